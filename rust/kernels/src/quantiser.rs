//! The quantisation of the keys or values of one token and head by their range, and the order of quantised values
//! inside a panel.
//!
//! ```text
//! scale  = (max - min) / levels      levels = 2^bits - 1, so values are 0 ..= levels
//! zero   = -min / scale              the quantised value of 0.0
//! q      = round(x / scale + zero)   ties to even
//! x      ~ scale * (q - zero)  =  offset + scale * q      with offset = -zero * scale = min
//! ```
//!
//! These are the scale and zero that DashInfer documents for its quantised KV cache, with Qmin = 0 and the zero stored
//! as an offset. The offset is `min`, so a constant row has scale 0 and is restored exactly, and dequantisation does
//! not divide. The scale is rounded *up* to bf16, so that `levels` steps reach `max`; its 8 significant bits times 8
//! bits are exact in f32, so `offset + scale * q` is rounded once, on every instruction set. The error is at most half
//! a scale plus the roundings of `x - min` and of that sum. (If `max - min` reaches the largest f32, large values may
//! be restored as infinity.)
//!
//! A row with a NaN or an infinity is restored as NaN: offset NaN, scale 0, quantised values 0.
//!
//! ```text
//! panel   [word][16 lanes] of 32 bits       a word is 4 steps of 8 bits or 8 steps of 4 bits
//! word    step 2 i in bits i * bits of the low half, step 2 i + 1 in the same bits of the high half
//! ```
//!
//! A shift and a mask extract a pair of consecutive steps into two 16-bit halves, the operand format of integer
//! multiply-and-add instructions.

use half::bf16;

use crate::panel::LANES;

/// Bytes of one word of all lanes.
pub(crate) const WORD_BYTES: usize = 4 * LANES;

/// Added to a float in 0..2^22, it leaves the nearest integer, ties to even, in the low bits.
pub(crate) const ROUND: f32 = 1.5 * (1 << 23) as f32;

/// A quantisation to unsigned integers of `bits` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantiser {
    pub(crate) bits: u32,
}

/// The quantisation parameters of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantParams {
    pub(crate) scale: bf16,
    pub(crate) offset: f32,
}

impl QuantParams {
    /// The dequantised value of `q`.
    pub(crate) fn value(self, q: u32) -> f32 {
        self.offset + self.scale.to_f32() * q as f32
    }
}

impl Quantiser {
    pub(crate) const INT8: Self = Self { bits: 8 };

    /// The largest quantised value.
    pub(crate) const fn levels(self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Steps per word.
    pub(crate) const fn steps(self) -> usize {
        (u32::BITS / self.bits) as usize
    }

    /// Words of `steps` steps; the unused steps of the last word are only multiplied by 0.
    pub(crate) const fn words(self, steps: usize) -> usize {
        steps.div_ceil(self.steps())
    }

    /// Bytes of a panel of `steps` steps.
    pub(crate) const fn panel_bytes(self, steps: usize) -> usize {
        self.words(steps) * WORD_BYTES
    }

    /// The lowest bit of step `step` inside its word.
    const fn shift(self, step: usize) -> u32 {
        let within = (step % self.steps()) as u32;
        within / 2 * self.bits + within % 2 * (u32::BITS / 2)
    }

    /// The byte of a panel that has step `step` of `lane`, and the lowest bit inside it.
    const fn position(self, step: usize, lane: usize) -> (usize, u32) {
        let shift = self.shift(step);
        ((step / self.steps() * LANES + lane) * 4 + (shift / 8) as usize, shift % 8)
    }

    /// Reads one quantised value of a panel.
    pub(crate) fn get(self, panel: &[u8], step: usize, lane: usize) -> u32 {
        let (byte, shift) = self.position(step, lane);
        u32::from(panel[byte] >> shift) & self.levels()
    }

    /// The quantisation parameters of a row, from its least and largest value.
    pub(crate) fn params(self, row: &[f32]) -> QuantParams {
        // By lane, so that the compiler vectorises it: none of the three depends on the order.
        let (mut least, mut largest) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        let mut non_finite = [0.0; LANES];
        for part in row.chunks(LANES) {
            for (lane, x) in part.iter().enumerate() {
                least[lane] = if *x < least[lane] { *x } else { least[lane] };
                largest[lane] = if *x > largest[lane] { *x } else { largest[lane] };
                non_finite[lane] += 0.0 * x; // NaN if x is not finite
            }
        }
        if non_finite.iter().sum::<f32>() != 0.0 {
            return QuantParams { scale: bf16::ZERO, offset: f32::NAN };
        }
        let min = least.iter().copied().fold(f32::INFINITY, f32::min);
        let max = largest.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // The difference of two f32 may not be an f32.
        let exact = (f64::from(max) - f64::from(min)) / f64::from(self.levels());
        QuantParams { scale: round_up(exact), offset: min + 0.0 } // turns -0 into 0
    }

    /// The quantised values of up to 16 values of a row; the rest are 0.
    pub(crate) fn quantise(self, params: QuantParams, part: &[f32]) -> [u8; LANES] {
        let mut quantised = [0; LANES];
        let scale = params.scale.to_f32();
        if scale > 0.0 {
            // Halved, because x - min may overflow.
            let (offset, scale) = (0.5 * params.offset, 0.5 * scale);
            for (q, x) in quantised.iter_mut().zip(part) {
                let steps = (0.5 * x - offset) / scale;
                *q = ((steps + ROUND).to_bits() & self.levels()) as u8;
            }
        }
        quantised
    }

    /// Writes 16 steps of `lane`, from `step` (a multiple of 16) on or as many as the panel has; other lanes do not
    /// change.
    pub(crate) fn set_steps(self, panel: &mut [u8], step: usize, lane: usize, quantised: [u8; LANES]) {
        let words = panel[step / self.steps() * WORD_BYTES..].chunks_exact_mut(WORD_BYTES);
        for (word, quantised) in words.zip(quantised.chunks_exact(self.steps())) {
            let bits = (0..self.steps()).fold(0, |bits, i| bits | u32::from(quantised[i]) << self.shift(i));
            word[4 * lane..][..4].copy_from_slice(&bits.to_le_bytes());
        }
    }

    /// Writes step `step` of all lanes; other steps do not change.
    pub(crate) fn set_lanes(self, panel: &mut [u8], step: usize, quantised: [u8; LANES]) {
        let (first, shift) = self.position(step, 0);
        let mask = (self.levels() << shift) as u8;
        for (lane, q) in quantised.into_iter().enumerate() {
            let byte = &mut panel[first + 4 * lane];
            *byte = *byte & !mask | q << shift;
        }
    }
}

/// The least bf16 that is not below `value`, which lies between 0 and the largest f32.
fn round_up(value: f64) -> bf16 {
    let nearest = value as f32;
    let single = if f64::from(nearest) < value { nearest.next_up() } else { nearest };
    bf16::from_bits((single.to_bits().next_multiple_of(1 << 16) >> 16) as u16)
}
