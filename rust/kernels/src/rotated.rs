//! The `uint4` encoding of the keys and values of one token and head: a rotation, then integers with a scale.
//!
//! A few dimensions of keys are far larger than the others. A Hadamard transform distributes them over all dimensions,
//! so that few values are far from the mean magnitude and 4 bits are enough. The transform is orthonormal: attention
//! transforms the query like the keys, which leaves the scores as they are, and transforms its output back, because
//! the weighted sum of transformed values is the transform of the weighted sum.
//!
//! ```text
//! keys    two parts, each transformed by itself and with a scale of its own:
//!         fast   the dimensions that the rotary embedding rotates fastest, 4 bits
//!         slow   the other dimensions, which have most of the energy, 5 bits
//! values  one part of 4 bits
//! x       ~ scale * (q - levels / 2)      levels = 2^bits - 1, so q is 0 ..= levels
//! ```
//!
//! Rotary embedding rotates dimension i with dimension i + head_dim / 2, fastest for i = 0. The slow part is half of
//! the head, rounded down to a multiple of 32; the fast part is dimensions `0..n` and `head_dim / 2 ..+ n`, where 2 n
//! is the rest rounded down to a multiple of 16. A head of fewer than 64 dimensions is slow. A part whose length is not
//! a power of two is transformed in blocks of its largest power-of-two divisor.
//!
//! ```text
//! K panel of the slow part    [group of 32 steps][5 words][16 lanes] of 32 bits
//! word                        steps 6 w + 2 i and 6 w + 2 i + 1 of the group in bits 5 i of the low and the high half
//! bit 15 of both halves       bit 4 - w of steps 30 and 31
//! ```
//!
//! A scale is the one of some representable scales that has the least squared error. The three scales take 32 bits:
//!
//! ```text
//! bits   20..=30    scale of the slow part: 8 bits of exponent and 3 of mantissa, as in f32
//!         9..=19    scale of the values, likewise
//!         0..=8     scale of the fast part: 8 bits of exponent and 1 of mantissa
//! ```
//!
//! A part with a NaN or an infinity, or whose transform overflows, has scale NaN and is restored as NaN. A part whose
//! scale would be below [`LEAST_SCALE`] is restored as 0.

use std::ops::Range;

use crate::panel::LANES;
use crate::quantiser::{Quantiser, ROUND, WORD_BYTES};

/// Below it, the inverse of a scale may overflow.
const LEAST_SCALE: f32 = 1e-37;

/// The largest head that is transformed without an allocation.
const STACK_FLOATS: usize = 512;

/// The order of values of 4 bits.
pub(crate) const NIBBLES: Quantiser = Quantiser { bits: 4 };
/// Levels of values of 5 bits.
pub(crate) const SLOW_LEVELS: u32 = 31;
/// Steps of 5 bits in a group, and its words.
pub(crate) const GROUP: usize = 32;
pub(crate) const GROUP_WORDS: usize = 5;

/// The scale of a part inside the 32 bits of a token: `word << left & mask` are the bits of an f32.
#[derive(Clone, Copy)]
pub(crate) struct ScaleField {
    pub(crate) left: u32,
    pub(crate) mask: u32,
    /// Bits of an f32 below those that are stored.
    dropped: u32,
    /// Representable scales that are tried.
    candidates: u32,
}

impl ScaleField {
    pub(crate) const SLOW: Self = Self { left: 0, mask: 0x7ff0_0000, dropped: 20, candidates: 4 };
    pub(crate) const VALUES: Self = Self { left: 11, mask: 0x7ff0_0000, dropped: 20, candidates: 4 };
    pub(crate) const FAST: Self = Self { left: 22, mask: 0x7fc0_0000, dropped: 22, candidates: 2 };

    fn scale(self, word: u32) -> f32 {
        f32::from_bits(word << self.left & self.mask)
    }

    /// The bits of a token that store `scale`, which is representable.
    fn word(self, scale: f32) -> u32 {
        scale.to_bits() >> self.left
    }

    /// The representable scale with the least squared error of `part`, quantised to 0 ..= `levels`.
    fn choose(self, part: &[f32], levels: u32) -> f32 {
        // By lane, so that the compiler vectorises it: neither depends on the order.
        let (mut largest, mut non_finite) = ([0.0_f32; LANES], [0.0; LANES]);
        for part in part.chunks(LANES) {
            for (lane, x) in part.iter().enumerate() {
                largest[lane] = if x.abs() > largest[lane] { x.abs() } else { largest[lane] };
                non_finite[lane] += 0.0 * x; // NaN if x is not finite
            }
        }
        if non_finite.iter().sum::<f32>() != 0.0 {
            return f32::NAN;
        }
        let exact = largest.iter().copied().fold(0.0, f32::max) / (0.5 * levels as f32);
        if exact < LEAST_SCALE {
            return 0.0;
        }
        let first = exact.to_bits().next_multiple_of(1 << self.dropped);
        let (mut best, mut least_error) = (0.0, f32::INFINITY);
        for candidate in 0..self.candidates {
            let scale = f32::from_bits(first - (candidate << self.dropped));
            let error = squared_error(part, levels, scale) * (scale / exact) * (scale / exact);
            if error < least_error {
                (best, least_error) = (scale, error);
            }
        }
        best
    }
}

/// A value in steps of a scale, from 0 to `levels`, and the nearest integer.
#[inline(always)]
fn quantise(x: f32, inverse: f32, levels: f32) -> (f32, f32) {
    let exact = x * inverse + 0.5 * levels;
    let clipped = if exact > 0.0 { exact } else { 0.0 };
    let clipped = if clipped < levels { clipped } else { levels };
    (exact, (clipped + ROUND) - ROUND)
}

/// The squared error of `part` in steps of `scale`.
fn squared_error(part: &[f32], levels: u32, scale: f32) -> f32 {
    let (inverse, levels) = (1.0 / scale, levels as f32);
    let mut errors = [0.0; LANES];
    for part in part.chunks(LANES) {
        for (lane, x) in part.iter().enumerate() {
            let (exact, integer) = quantise(*x, inverse, levels);
            errors[lane] += (exact - integer) * (exact - integer);
        }
    }
    errors.iter().sum()
}

/// The quantised values of up to 16 values of a part; the rest are 0.
fn quantise_lanes(part: &[f32], levels: u32, scale: f32) -> [u8; LANES] {
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut quantised = [0; LANES];
    for (q, x) in quantised.iter_mut().zip(part) {
        let (_, integer) = quantise(*x, inverse, levels as f32);
        *q = integer as u8;
    }
    quantised
}

/// The Hadamard transform, in place, in blocks of the largest power of two that divides the length; it is its own
/// inverse.
fn transform(part: &mut [f32]) {
    let block = block_of(part.len());
    let unit = 1.0 / (block as f32).sqrt();
    for part in part.chunks_exact_mut(block) {
        part.iter_mut().for_each(|x| *x *= unit);
        let mut half = 1;
        while half < block {
            for pair in part.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (low, high) in low.iter_mut().zip(high) {
                    (*low, *high) = (*low + *high, *low - *high);
                }
            }
            half *= 2;
        }
    }
}

/// The length of the blocks in which `count` floats are transformed.
pub(crate) const fn block_of(count: usize) -> usize {
    if count == 0 { 1 } else { 1 << count.trailing_zeros() }
}

/// The parts of a key.
#[derive(Clone, Copy)]
pub(crate) struct KeyParts {
    head_dim: usize,
    /// Floats of the fast part, a multiple of 16.
    pub(crate) fast: usize,
}

impl KeyParts {
    pub(crate) const fn new(head_dim: usize) -> Self {
        if head_dim < 2 * GROUP {
            return Self { head_dim, fast: 0 };
        }
        let slow = head_dim / 2 / GROUP * GROUP;
        Self { head_dim, fast: (head_dim - slow) / LANES * LANES }
    }

    /// Floats of the slow part.
    pub(crate) const fn slow(self) -> usize {
        self.head_dim - self.fast
    }

    /// Words of the fast part and groups of the slow part; they are the K panel.
    pub(crate) const fn words_and_groups(self) -> (usize, usize) {
        (NIBBLES.words(self.fast), self.slow().div_ceil(GROUP))
    }

    pub(crate) const fn panel_bytes(self) -> usize {
        let (words, groups) = self.words_and_groups();
        (words + groups * GROUP_WORDS) * WORD_BYTES
    }

    /// The dimensions of a head in the order of the parts: the fast part is the first two ranges.
    pub(crate) fn dimensions(self) -> [Range<usize>; 4] {
        let (half, quarter) = (self.head_dim / 2, self.fast / 2);
        [0..quarter, half..half + quarter, quarter..half, half + quarter..self.head_dim]
    }
}

/// The word of a group and the lowest bit inside it of step `step` below 30.
const fn group_position(step: usize) -> (usize, u32) {
    let pair = step / 2;
    (pair / 3, (pair % 3 * 5 + step % 2 * 16) as u32)
}

/// Writes the steps of `lane` of a group.
fn set_group(group: &mut [u8], lane: usize, quantised: [u8; GROUP]) {
    let mut words = [0_u32; GROUP_WORDS];
    for (step, q) in quantised[..GROUP - 2].iter().enumerate() {
        let (word, shift) = group_position(step);
        words[word] |= u32::from(*q) << shift;
    }
    for (w, word) in words.iter_mut().enumerate() {
        let bit = |step: usize| u32::from(quantised[step] >> (GROUP_WORDS - 1 - w)) & 1;
        *word |= bit(GROUP - 2) << 15 | bit(GROUP - 1) << 31;
        group[w * WORD_BYTES + 4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

/// Reads one quantised value of the slow part.
fn get_of_group(panel: &[u8], step: usize, lane: usize) -> u32 {
    let group = &panel[step / GROUP * GROUP_WORDS * WORD_BYTES..];
    let word = |w: usize| u32::from_le_bytes(std::array::from_fn(|i| group[w * WORD_BYTES + 4 * lane + i]));
    let step = step % GROUP;
    if step < GROUP - 2 {
        let (index, shift) = group_position(step);
        return word(index) >> shift & SLOW_LEVELS;
    }
    (0..GROUP_WORDS).fold(0, |q, w| q << 1 | word(w) >> (15 + step % 2 * 16) & 1)
}

/// Calls `f` with a buffer of `count` floats.
fn with_buffer<R>(count: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    if count <= STACK_FLOATS { f(&mut [0.0; STACK_FLOATS][..count]) } else { f(&mut vec![0.0; count]) }
}

/// Writes one token of a head: `params`, the K panel and the V panels of its tile.
pub(crate) fn write(
    params: &mut [u8],
    keys: &mut [u8],
    values: &mut [u8],
    lane: usize,
    k: &[f32],
    v: &[f32],
) {
    let word = with_buffer(k.len(), |buffer| {
        let scales = write_key(keys, lane, k, buffer);
        scales | write_value(values, lane, v, buffer)
    });
    params[4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
}

/// Writes a key, and returns the bits of its scales.
fn write_key(panel: &mut [u8], lane: usize, k: &[f32], buffer: &mut [f32]) -> u32 {
    let parts = KeyParts::new(k.len());
    let mut at = 0;
    for range in parts.dimensions() {
        buffer[at..at + range.len()].copy_from_slice(&k[range.clone()]);
        at += range.len();
    }
    let (fast, slow) = buffer.split_at_mut(parts.fast);
    transform(fast);
    transform(slow);
    let fast_scale = ScaleField::FAST.choose(fast, NIBBLES.levels());
    let slow_scale = ScaleField::SLOW.choose(slow, SLOW_LEVELS);
    let (fast_panel, slow_panel) = panel.split_at_mut(parts.words_and_groups().0 * WORD_BYTES);
    for (index, part) in fast.chunks(LANES).enumerate() {
        let quantised = quantise_lanes(part, NIBBLES.levels(), fast_scale);
        NIBBLES.set_steps(fast_panel, index * LANES, lane, quantised);
    }
    for (part, group) in slow.chunks(GROUP).zip(slow_panel.chunks_exact_mut(GROUP_WORDS * WORD_BYTES)) {
        let mut quantised = [0; GROUP];
        for (quantised, part) in quantised.chunks_exact_mut(LANES).zip(part.chunks(LANES)) {
            quantised.copy_from_slice(&quantise_lanes(part, SLOW_LEVELS, slow_scale));
        }
        set_group(group, lane, quantised);
    }
    ScaleField::FAST.word(fast_scale) | ScaleField::SLOW.word(slow_scale)
}

/// Writes a value, and returns the bits of its scale.
fn write_value(panels: &mut [u8], lane: usize, v: &[f32], buffer: &mut [f32]) -> u32 {
    buffer.copy_from_slice(v);
    transform(buffer);
    let scale = ScaleField::VALUES.choose(buffer, NIBBLES.levels());
    for (part, panel) in buffer.chunks(LANES).zip(panels.chunks_exact_mut(NIBBLES.panel_bytes(LANES))) {
        NIBBLES.set_lanes(panel, lane, quantise_lanes(part, NIBBLES.levels(), scale));
    }
    ScaleField::VALUES.word(scale)
}

/// The key and the value of one token of a head, appended to `k` and `v`.
pub(crate) fn read(
    head_dim: usize,
    [params, keys, values]: [&[u8]; 3],
    lane: usize,
    k: &mut Vec<f32>,
    v: &mut Vec<f32>,
) {
    let word = u32::from_le_bytes(std::array::from_fn(|i| params[4 * lane + i]));
    let restore =
        |field: ScaleField, q: u32, levels: u32| field.scale(word) * (q as f32 - 0.5 * levels as f32);
    let parts = KeyParts::new(head_dim);
    let (fast_panel, slow_panel) = keys.split_at(parts.words_and_groups().0 * WORD_BYTES);
    let mut ordered = Vec::new();
    for step in 0..parts.fast {
        ordered.push(restore(ScaleField::FAST, NIBBLES.get(fast_panel, step, lane), NIBBLES.levels()));
    }
    for step in 0..parts.slow() {
        ordered.push(restore(ScaleField::SLOW, get_of_group(slow_panel, step, lane), SLOW_LEVELS));
    }
    let (fast, slow) = ordered.split_at_mut(parts.fast);
    transform(fast);
    transform(slow);
    let from = k.len();
    k.resize(from + head_dim, 0.0);
    let mut at = 0;
    for range in parts.dimensions() {
        k[from + range.start..from + range.end].copy_from_slice(&ordered[at..at + range.len()]);
        at += range.len();
    }
    let from = v.len();
    for d in 0..head_dim {
        let panel = &values[d / LANES * NIBBLES.panel_bytes(LANES)..];
        v.push(restore(ScaleField::VALUES, NIBBLES.get(panel, lane, d % LANES), NIBBLES.levels()));
    }
    transform(&mut v[from..]);
}
