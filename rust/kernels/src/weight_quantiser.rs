//! Quantisation of weights: the nearest code to each weight, with the scale of the least squared error.
//!
//! A few scales around that of the largest weight are tried; clipping a rare large weight often lowers the error of the
//! group. Scales are rounded to their type before the codes are chosen. A group with a weight that is not finite has a
//! scale of NaN, so that its products are NaN.

use half::{bf16, f16};
use penstock_types::{Grid, GridRows, Minimum, ScaleFormat};

/// The scales that are tried, relative to the one without clipping.
const FACTORS: [f32; 10] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 1.04];

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

/// The nearest code, as a float.
#[inline(always)]
fn code_of(weight: f32, minimum: f32, inverse: f32, levels: f32) -> f32 {
    // A NaN becomes 0; its group has a scale of NaN.
    ((weight - minimum) * inverse).round_ties_even().max(0.0).min(levels)
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
    (best.1, best.2)
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
