//! How the keys or values of one token and head become codes, and where a code lies inside a panel.
//!
//! ```text
//! scale  = (max - min) / levels      levels = 2^bits - 1, so codes are 0 ..= levels
//! zero   = -min / scale              the code that would stand for 0.0
//! code   = round(x / scale + zero)   ties to even
//! x      ~ scale * (code - zero)  =  offset + scale * code      with offset = -zero * scale = min
//! ```
//!
//! These are the scale and zero that DashInfer documents for its quantised KV cache, with Qmin = 0 and with the zero
//! kept as an offset: that is `min` itself, so a constant row has scale 0 and comes back exactly, and nothing is
//! divided by a scale on the way back. The scale is rounded *up* to bf16, so that `levels` steps still reach `max`;
//! its 8 significant bits times a code of 8 fit an f32 exactly, so `offset + scale * code` is rounded once, on every
//! instruction set. The error is at most half a scale, and the roundings of `x - min` and of that sum. (Where
//! `max - min` reaches the largest f32, large numbers may come back as infinity.)
//!
//! A row with a NaN or an infinity in it becomes NaN as a whole: offset NaN, scale 0, codes 0.
//!
//! ```text
//! panel   [word][16 lanes] of 32 bits       a word is 4 steps of 8 bits or 8 steps of 4 bits
//! word    step 2 i in bits i * bits of the low half, step 2 i + 1 in the same bits of the high half
//! ```
//!
//! So a shift and a mask turn a word into a pair of neighbouring steps in two 16-bit halves, which is what the
//! multiply-and-add instructions of integers take.

use half::bf16;

use crate::panel::LANES;

/// Bytes of one word of all lanes.
pub(crate) const WORD_BYTES: usize = 4 * LANES;

/// Adding it to a number in 0..2^22 leaves the nearest integer, ties to even, in the low bits.
const ROUND: f32 = 1.5 * (1 << 23) as f32;

/// A width of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantiser {
    pub(crate) bits: u32,
}

/// What the codes of one row stand for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) scale: bf16,
    pub(crate) offset: f32,
}

impl Grid {
    /// The number that `code` stands for.
    pub(crate) fn value(self, code: u32) -> f32 {
        self.offset + self.scale.to_f32() * code as f32
    }
}

impl Quantiser {
    pub(crate) const INT8: Self = Self { bits: 8 };
    pub(crate) const UINT4: Self = Self { bits: 4 };

    /// The largest code.
    pub(crate) const fn levels(self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Steps of a word.
    pub(crate) const fn steps(self) -> usize {
        (u32::BITS / self.bits) as usize
    }

    /// Words that `steps` steps take; what is left of the last one is never multiplied with anything but 0.
    pub(crate) const fn words(self, steps: usize) -> usize {
        steps.div_ceil(self.steps())
    }

    /// Bytes of a panel of `steps` steps.
    pub(crate) const fn panel_bytes(self, steps: usize) -> usize {
        self.words(steps) * WORD_BYTES
    }

    /// The bits of step `step` inside its word.
    const fn shift(self, step: usize) -> u32 {
        let within = (step % self.steps()) as u32;
        within / 2 * self.bits + within % 2 * (u32::BITS / 2)
    }

    /// Which byte of a panel holds step `step` of `lane`, and from which bit on.
    const fn place(self, step: usize, lane: usize) -> (usize, u32) {
        let shift = self.shift(step);
        ((step / self.steps() * LANES + lane) * 4 + (shift / 8) as usize, shift % 8)
    }

    /// Reads one code of a panel.
    pub(crate) fn get(self, panel: &[u8], step: usize, lane: usize) -> u32 {
        let (byte, shift) = self.place(step, lane);
        u32::from(panel[byte] >> shift) & self.levels()
    }

    /// The grid of a row, from its least and largest number.
    pub(crate) fn grid(self, row: &[f32]) -> Grid {
        // Lane by lane, so that the compiler vectorises it: none of the three depends on an order.
        let (mut least, mut largest) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
        let mut spoiled = [0.0; LANES];
        for part in row.chunks(LANES) {
            for (lane, x) in part.iter().enumerate() {
                least[lane] = if *x < least[lane] { *x } else { least[lane] };
                largest[lane] = if *x > largest[lane] { *x } else { largest[lane] };
                spoiled[lane] += 0.0 * x; // NaN for what is not finite
            }
        }
        if spoiled.iter().sum::<f32>() != 0.0 {
            return Grid { scale: bf16::ZERO, offset: f32::NAN };
        }
        let min = least.iter().copied().fold(f32::INFINITY, f32::min);
        let max = largest.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // The difference of two f32 may be no f32.
        let exact = (f64::from(max) - f64::from(min)) / f64::from(self.levels());
        Grid { scale: round_up(exact), offset: min + 0.0 } // not -0, of which a row may have some
    }

    /// The codes of up to 16 numbers of a row; the rest are 0.
    pub(crate) fn codes(self, grid: Grid, part: &[f32]) -> [u8; LANES] {
        let mut codes = [0; LANES];
        let scale = grid.scale.to_f32();
        if scale > 0.0 {
            // In halves, because x - min may overflow.
            let (offset, scale) = (0.5 * grid.offset, 0.5 * scale);
            for (code, x) in codes.iter_mut().zip(part) {
                let steps = (0.5 * x - offset) / scale;
                *code = ((steps + ROUND).to_bits() & self.levels()) as u8;
            }
        }
        codes
    }

    /// Writes 16 steps of `lane` (or as many as the panel has from `step` on, a multiple of 16) and no other lane.
    pub(crate) fn set_steps(self, panel: &mut [u8], step: usize, lane: usize, codes: [u8; LANES]) {
        let words = panel[step / self.steps() * WORD_BYTES..].chunks_exact_mut(WORD_BYTES);
        for (word, codes) in words.zip(codes.chunks_exact(self.steps())) {
            let bits = (0..self.steps()).fold(0, |bits, i| bits | u32::from(codes[i]) << self.shift(i));
            word[4 * lane..][..4].copy_from_slice(&bits.to_le_bytes());
        }
    }

    /// Writes step `step` of all lanes and no other step.
    pub(crate) fn set_lanes(self, panel: &mut [u8], step: usize, codes: [u8; LANES]) {
        let (first, shift) = self.place(step, 0);
        let mask = (self.levels() << shift) as u8;
        for (lane, code) in codes.into_iter().enumerate() {
            let byte = &mut panel[first + 4 * lane];
            *byte = *byte & !mask | code << shift;
        }
    }
}

/// The least bf16 that is not below `value`, a number from 0 to the largest f32.
fn round_up(value: f64) -> bf16 {
    let nearest = value as f32;
    let single = if f64::from(nearest) < value { nearest.next_up() } else { nearest };
    bf16::from_bits((single.to_bits().next_multiple_of(1 << 16) >> 16) as u16)
}
