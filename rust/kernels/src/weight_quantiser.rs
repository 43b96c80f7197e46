//! Quantisation of weights: the nearest code to each weight.
//!
//! A few scales around that of the largest weight are tried; clipping a rare large weight often lowers the squared
//! error of the group. The scale and the minimum are then fitted to the codes by least squares. Scales are rounded to
//! their type before the codes are chosen. A group with a weight that is not finite has a scale of NaN, so that its
//! products are NaN.

use half::{bf16, f16};
use penstock_types::{CodeBits, Grid, GridRows, MAX_E4M3_SCALE, Minimum, ScaleFormat};

/// The scales that are tried, relative to the one without clipping.
const FACTORS: [f32; 10] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 1.04];
/// Maximum number of fits by least squares.
const FITS: usize = 3;

/// Quantises `rows` rows of `columns` weights.
///
/// # Panics
/// If the scales are nested or the minima are zero points: those formats are read, not made.
pub fn quantise(grid: &Grid, weights: &[f32], columns: usize, out: &mut GridRows) {
    assert!(
        grid.scales != ScaleFormat::Nested && grid.minimum != Minimum::ZeroPoint,
        "{grid:?} is not made; this is a bug"
    );
    let rows = weights.len() / columns;
    out.resize(grid, rows, columns);
    let width = grid.group.map_or(columns, usize::from);
    let (groups, levels) = (grid.groups(columns), (1 << grid.bits.count()) - 1);
    for (row, weights) in weights.chunks_exact(columns).enumerate() {
        let codes = &mut out.codes[row * columns..][..columns];
        for (group, (weights, codes)) in weights.chunks(width).zip(codes.chunks_mut(width)).enumerate() {
            if grid.bits == CodeBits::E4m3 {
                out.scales[row * groups + group] = quantise_e4m3(grid, weights, codes);
                continue;
            }
            let (scale, minimum) = match grid.minimum {
                Minimum::Stored => with_minimum(grid, weights, levels),
                _ => centred(grid, weights),
            };
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            for (code, weight) in codes.iter_mut().zip(weights) {
                *code = code_of(*weight, minimum, inverse, levels as f32) as u8;
            }
            out.scales[row * groups + group] = scale;
            if grid.minimum == Minimum::Stored {
                out.minima[row * groups + group] = minimum;
            }
        }
    }
}

/// Writes the codes of a group with the scale that makes the largest weight the largest number of the type. Returns the
/// scale.
fn quantise_e4m3(grid: &Grid, weights: &[f32], codes: &mut [u8]) -> f32 {
    const LARGEST: f32 = 448.0;
    let largest = weights.iter().fold(0.0_f32, |largest, weight| largest.max(weight.abs()));
    let scale = round_scale(grid.scales, largest / LARGEST);
    // Larger weights than any model has; `max` ignores a NaN.
    if weights.iter().any(|weight| !weight.is_finite()) || scale >= MAX_E4M3_SCALE {
        codes.fill(0);
        return f32::NAN;
    }
    let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
    for (code, weight) in codes.iter_mut().zip(weights) {
        *code = e4m3_code((weight * inverse).clamp(-LARGEST, LARGEST));
    }
    scale
}

/// The nearest code to a number of at most 448, ties to even.
#[inline(always)]
fn e4m3_code(number: f32) -> u8 {
    let (sign, magnitude) = ((number.to_bits() >> 24 & 0x80) as u8, number.abs());
    // Multiples of 2^-9 below 2^-6, and three bits of mantissa from there on; a carry goes to the exponent.
    let subnormal = round(magnitude * 512.0) as u8;
    let bits = magnitude.to_bits();
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    sign | if magnitude < 1.0 / 64.0 { subnormal } else { (rounded as i32 - (120 << 3)) as u8 }
}

/// The nearest code, as a float.
#[inline(always)]
fn code_of(weight: f32, minimum: f32, inverse: f32, levels: f32) -> f32 {
    let code = (weight - minimum) * inverse;
    // A NaN becomes 0; its group has a scale of NaN.
    let code = if code > 0.0 { code } else { 0.0 };
    round(if code < levels { code } else { levels })
}

/// Rounds a number from 0 to 2^22 to the nearest integer, ties to even. Unlike `round_ties_even` it is vectorised on
/// every CPU: from 2^23 on, floats are integers.
#[inline(always)]
fn round(number: f32) -> f32 {
    const INTEGERS: f32 = (1 << 23) as f32;
    (number + INTEGERS) - INTEGERS
}

/// The scale, and the minimum that it implies.
fn centred(grid: &Grid, weights: &[f32]) -> (f32, f32) {
    let (centre, levels) = (grid.bits.centre() as f32, (1 << grid.bits.count()) as f32 - 1.0);
    let largest = weights
        .iter()
        .fold(0.0_f32, |largest, weight| if weight.abs() > largest.abs() { *weight } else { largest });
    if weights.iter().any(|weight| !weight.is_finite()) {
        return (f32::NAN, f32::NAN);
    }
    if largest == 0.0 {
        return (0.0, 0.0);
    }
    // There is one more code below the centre than above it: of 4 bits the largest weight gets -8, with the sign in the
    // scale. Of 8 bits that gains nothing, and both ends are at 127.
    let (full, factors) = if grid.bits.count() == 8 {
        (largest.abs() / 127.0, &FACTORS[..1])
    } else {
        (largest / -centre, &FACTORS[..])
    };
    let mut best = (f32::INFINITY, 0.0);
    for factor in factors {
        let scale = round_scale(grid.scales, full * factor);
        let error = error(weights, scale, -scale * centre, levels);
        if error < best.0 {
            best = (error, scale);
        }
    }
    for _ in 0..FITS {
        let sums = Sums::new(weights, best.1, -best.1 * centre, levels);
        let scale = round_scale(grid.scales, sums.centred_scale(centre));
        let error = error(weights, scale, -scale * centre, levels);
        if error >= best.0 || error.is_nan() {
            break;
        }
        best = (error, scale);
    }
    (best.1, -best.1 * centre)
}

fn with_minimum(grid: &Grid, weights: &[f32], levels: u32) -> (f32, f32) {
    let levels = levels as f32;
    let (low, high) =
        weights.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), w| (low.min(*w), high.max(*w)));
    if weights.iter().any(|weight| !weight.is_finite()) {
        return (f32::NAN, f32::NAN);
    }
    let mut best = (f32::INFINITY, 0.0, round_scale(grid.scales, low));
    for factor in FACTORS {
        let middle = (low + high) / 2.0;
        let scale = round_scale(grid.scales, (high - low) / levels * factor);
        let minimum = round_scale(grid.scales, middle - (high - low) / 2.0 * factor);
        let error = error(weights, scale, minimum, levels);
        if error < best.0 {
            best = (error, scale, minimum);
        }
    }
    for _ in 0..FITS {
        let (scale, minimum) = Sums::new(weights, best.1, best.2, levels).scale_and_minimum();
        let (scale, minimum) = (round_scale(grid.scales, scale), round_scale(grid.scales, minimum));
        let error = error(weights, scale, minimum, levels);
        if error >= best.0 || error.is_nan() {
            break;
        }
        best = (error, scale, minimum);
    }
    (best.1, best.2)
}

/// Sums over the codes of a group and its weights.
#[derive(Default)]
struct Sums {
    count: f32,
    codes: f32,
    squares: f32,
    weights: f32,
    products: f32,
}

impl Sums {
    /// The codes are those for this scale and minimum.
    fn new(weights: &[f32], scale: f32, minimum: f32, levels: f32) -> Self {
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let mut lanes = [[0.0; 8]; 4];
        for chunk in weights.chunks(8) {
            for (lane, weight) in chunk.iter().enumerate() {
                let code = code_of(*weight, minimum, inverse, levels);
                lanes[0][lane] += code;
                lanes[1][lane] += code * code;
                lanes[2][lane] += weight;
                lanes[3][lane] += code * weight;
            }
        }
        let [codes, squares, sum, products] = lanes.map(|lanes| lanes.iter().sum());
        Self { count: weights.len() as f32, codes, squares, weights: sum, products }
    }

    /// The scale of the least squared error of `scale * (code - centre)`.
    fn centred_scale(&self, centre: f32) -> f32 {
        let products = self.products - centre * self.weights;
        let squares = self.squares - 2.0 * centre * self.codes + centre * centre * self.count;
        products / squares
    }

    /// The scale and the minimum of the least squared error of `scale * code + minimum`.
    fn scale_and_minimum(&self) -> (f32, f32) {
        let Self { count, codes, squares, weights, products } = *self;
        let scale = (count * products - codes * weights) / (count * squares - codes * codes);
        (scale, (weights - scale * codes) / count)
    }
}

/// The squared error of the codes for this scale and minimum.
#[inline(always)]
fn error(weights: &[f32], scale: f32, minimum: f32, levels: f32) -> f32 {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut sums = [0.0; 8];
    let (chunks, rest) = weights.as_chunks::<8>();
    for chunk in chunks {
        for lane in 0..8 {
            let difference = code_of(chunk[lane], minimum, inverse, levels) * scale + minimum - chunk[lane];
            sums[lane] += difference * difference;
        }
    }
    for weight in rest {
        let difference = code_of(*weight, minimum, inverse, levels) * scale + minimum - weight;
        sums[0] += difference * difference;
    }
    sums.iter().sum()
}

fn round_scale(format: ScaleFormat, value: f32) -> f32 {
    match format {
        ScaleFormat::F32 | ScaleFormat::Nested => value,
        ScaleFormat::F16 => f16::from_f32(value).to_f32(),
        ScaleFormat::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::Activations;

    use super::*;

    /// The squared error of rounding to the nearest of all codes, without clipping.
    fn error_without_search(grid: &Grid, group: &[f32]) -> f32 {
        let (low, high) = group.iter().fold((0.0_f32, 0.0_f32), |(low, high), w| (low.min(*w), high.max(*w)));
        let (scale, minimum) = match grid.minimum {
            Minimum::Stored => ((high - low) / 15.0, low),
            _ => (high.max(-low) / 7.5, -high.max(-low) / 7.5 * 8.0),
        };
        error(group, scale, minimum, 15.0)
    }

    #[test]
    fn search_lowers_the_error_by_a_tenth() {
        let mut state = 1_u64;
        let mut random = || {
            // Sums of uniform numbers: nearly normal.
            (0..12).fold(-6.0, |sum, _| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                sum + (state >> 40) as f32 / (1 << 24) as f32
            })
        };
        let weights: Vec<f32> = (0..64 * 256).map(|_| random()).collect();
        for minimum in [Minimum::Centred, Minimum::Stored] {
            for group in [32, 64, 128] {
                let grid = Grid {
                    bits: CodeBits::Four,
                    group: Some(group),
                    scales: ScaleFormat::Bf16,
                    minimum,
                    activations: Activations::Float,
                };
                let (mut rows, mut values) = (GridRows::default(), vec![0.0; weights.len()]);
                quantise(&grid, &weights, weights.len(), &mut rows);
                rows.dequantize_row(&grid, weights.len(), 0, &mut values);
                let found: f32 = values.iter().zip(&weights).map(|(a, b)| (a - b) * (a - b)).sum();
                let plain: f32 =
                    weights.chunks(group.into()).map(|group| error_without_search(&grid, group)).sum();
                assert!(found < 0.9 * plain, "{grid:?}: {found} instead of {plain}");
            }
        }
    }

    #[test]
    fn e4m3_code_is_the_nearest_number_with_ties_to_even() {
        let value = |code| CodeBits::E4m3.value(code);
        for code in 0..=0x7e {
            assert_eq!(e4m3_code(value(code)), code);
            assert_eq!(e4m3_code(-value(code)), code | 0x80);
            if code < 0x7e {
                let middle = (value(code) + value(code + 1)) / 2.0;
                assert_eq!(e4m3_code(middle), code + code % 2, "{middle}");
                assert_eq!(e4m3_code(middle * (1.0 - f32::EPSILON)), code);
                assert_eq!(e4m3_code(middle * (1.0 + 2.0 * f32::EPSILON)), code + 1);
            }
        }
    }
}
