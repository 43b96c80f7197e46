//! Conversion of stored elements to `f32`, block by block.
//!
//! These loops run when a model is loaded. Each iterates over arrays of constant length without branches or overflow
//! checks, which the compiler vectorises for any target. Bytes need no alignment. Results are exact for exact types,
//! otherwise rounded after the product and after the sum, so that they are bit-for-bit equal to those of other readers
//! of these formats.

use crate::storage::Storage;

/// Converts complete blocks. `bytes` contains exactly the elements of `out`.
pub(crate) fn to_f32(storage: Storage, bytes: &[u8], out: &mut [f32]) {
    match storage {
        Storage::F32 => each_block(bytes, out, |block: &[u8; 4], out: &mut [f32; 1]| {
            out[0] = f32::from_le_bytes(*block);
        }),
        Storage::F16 => each_block(bytes, out, |block: &[u8; 2], out: &mut [f32; 1]| {
            out[0] = f16_to_f32(u16::from_le_bytes(*block));
        }),
        Storage::Bf16 => each_block(bytes, out, |block: &[u8; 2], out: &mut [f32; 1]| {
            out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
        }),
        Storage::Q4_0 => each_block(bytes, out, q4_0),
        Storage::Q4_1 => each_block(bytes, out, q4_1),
        Storage::Q8_0 => each_block(bytes, out, q8_0),
        Storage::Q4K => each_block(bytes, out, q4_k),
        Storage::Q5K => each_block(bytes, out, q5_k),
        Storage::Q6K => each_block(bytes, out, q6_k),
    }
}

#[inline(always)]
fn each_block<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    convert: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let (blocks, rest) = bytes.as_chunks::<BYTES>();
    let (out, out_rest) = out.as_chunks_mut::<ELEMENTS>();
    assert!(
        rest.is_empty() && out_rest.is_empty() && blocks.len() == out.len(),
        "the input is complete blocks; this is a bug"
    );
    for (block, out) in blocks.iter().zip(out) {
        convert(block, out);
    }
}

/// Converts half to single precision without branches, exactly for every value. Subnormals are converted as integers,
/// not as subnormal singles, so the result does not depend on the processor's flush-to-zero mode.
#[inline(always)]
pub(crate) fn f16_to_f32(half: u16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    let half = u32::from(half);
    let (sign, magnitude) = ((half & 0x8000) << 16, half & 0x7fff);
    let normal = (magnitude << 13) + REBIAS;
    let subnormal = (magnitude as f32 * (1.0 / 16_777_216.0)).to_bits();
    let bits = if magnitude < 0x0400 { subnormal } else { normal };
    let bits = if magnitude >= 0x7c00 { normal + REBIAS } else { bits };
    f32::from_bits(sign | bits)
}

/// The half-precision number at a byte offset of a block.
#[inline(always)]
fn half_at<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = scale * (f32::from(byte & 15) - 8.0);
        *high = scale * (f32::from(byte >> 4) - 8.0);
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = scale * f32::from(byte & 15) + minimum;
        *high = scale * f32::from(byte >> 4) + minimum;
    }
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, byte) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(byte.cast_signed());
    }
}

/// The 6-bit scale and minimum of each group of 32, packed into 12 bytes. Groups 0..4 are in the low six bits of bytes
/// 0..4 (scales) and 4..8 (minima). Groups 4..8 have their low four bits in the nibbles of bytes 8..12 and their high
/// two bits in the top bits of bytes 0..8.
fn scales_and_minima(packed: &[u8]) -> [(f32, f32); 8] {
    std::array::from_fn(|group| {
        let (scale, minimum) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            let (scale_top, minimum_top) = (packed[group - 4] >> 6, packed[group] >> 6);
            (packed[group + 4] & 15 | scale_top << 4, packed[group + 4] >> 4 | minimum_top << 4)
        };
        (f32::from(scale), f32::from(minimum))
    })
}

fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let groups = scales_and_minima(&block[4..16]);
    let quants = block[16..].chunks_exact(32);
    for ((out, quants), groups) in out.chunks_exact_mut(64).zip(quants).zip(groups.chunks_exact(2)) {
        let (low, high) = out.split_at_mut(32);
        let [low_scale, high_scale] = [scale * groups[0].0, scale * groups[1].0];
        let [low_minimum, high_minimum] = [minimum * groups[0].1, minimum * groups[1].1];
        for ((low, high), byte) in low.iter_mut().zip(high).zip(quants) {
            *low = low_scale * f32::from(byte & 15) - low_minimum;
            *high = high_scale * f32::from(byte >> 4) - high_minimum;
        }
    }
}

fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let groups = scales_and_minima(&block[4..16]);
    let fifth_bits = &block[16..48];
    let quants = block[48..].chunks_exact(32);
    for (pair, ((out, quants), groups)) in
        out.chunks_exact_mut(64).zip(quants).zip(groups.chunks_exact(2)).enumerate()
    {
        let (low, high) = out.split_at_mut(32);
        let [low_scale, high_scale] = [scale * groups[0].0, scale * groups[1].0];
        let [low_minimum, high_minimum] = [minimum * groups[0].1, minimum * groups[1].1];
        for (((low, high), byte), fifth) in low.iter_mut().zip(high).zip(quants).zip(fifth_bits) {
            let fifth = fifth >> (2 * pair);
            *low = low_scale * f32::from(byte & 15 | (fifth & 1) << 4) - low_minimum;
            *high = high_scale * f32::from(byte >> 4 | (fifth >> 1 & 1) << 4) - high_minimum;
        }
    }
}

fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    let (low_bits, rest) = block.split_at(128);
    let (high_bits, scales) = rest[..80].split_at(64);
    let halves = low_bits.chunks_exact(64).zip(high_bits.chunks_exact(32)).zip(scales.chunks_exact(8));
    for (out, ((low, high), scales)) in out.chunks_exact_mut(128).zip(halves) {
        // Four runs of 32 elements. Runs 0 and 2 are the nibbles of one half of `low`, runs 1 and 3 of the other. Each
        // byte of `high` contains the upper two bits of one element of every run. Each scale applies to 16 elements.
        for (run, out) in out.chunks_exact_mut(32).enumerate() {
            let low = &low[run % 2 * 32..][..32];
            for (part, out) in out.chunks_exact_mut(16).enumerate() {
                let scale = scale * f32::from(scales[run * 2 + part].cast_signed());
                let bytes = low[part * 16..].iter().zip(&high[part * 16..]);
                for (out, (low, high)) in out.iter_mut().zip(bytes) {
                    let quant = low >> (run / 2 * 4) & 15 | (high >> (run * 2) & 3) << 4;
                    *out = scale * (f32::from(quant) - 32.0);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_precision_value_converts_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, expected) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(),
                "{bits:#06x}"
            );
        }
    }
}
