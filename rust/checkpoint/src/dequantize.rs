//! Conversion of stored elements to `f32`, block by block.
//!
//! These loops run when a model is loaded. Each iterates over arrays of constant length without branches or overflow
//! checks, which the compiler vectorises for any target. Bytes need no alignment. Results are exact for exact types,
//! otherwise rounded after the product and after the sum, so that they are bit-for-bit equal to those of other readers
//! of these formats.

use penstock_types::f16_to_f32;

use crate::blocks::{self, IQ4_VALUES, half_at};
use crate::storage::Storage;

/// Converts complete blocks. `bytes` contains exactly the elements of `out`.
pub(crate) fn to_f32(storage: Storage, bytes: &[u8], out: &mut [f32]) {
    match storage {
        Storage::F64 => each_block(bytes, out, |block: &[u8; 8], out: &mut [f32; 1]| {
            out[0] = f64::from_le_bytes(*block) as f32;
        }),
        Storage::F32 => each_block(bytes, out, |block: &[u8; 4], out: &mut [f32; 1]| {
            out[0] = f32::from_le_bytes(*block);
        }),
        Storage::F16 => each_block(bytes, out, |block: &[u8; 2], out: &mut [f32; 1]| {
            out[0] = f16_to_f32(u16::from_le_bytes(*block));
        }),
        Storage::Bf16 => each_block(bytes, out, |block: &[u8; 2], out: &mut [f32; 1]| {
            out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
        }),
        Storage::Q4_0 => each_block(bytes, out, |block, out| blocks::q4_0(block).write_centred(8, out)),
        Storage::Q4_1 => each_block(bytes, out, |block, out| blocks::q4_1(block).write_with_minima(out)),
        Storage::Q5_0 => each_block(bytes, out, |block, out| blocks::q5_0(block).write_centred(16, out)),
        Storage::Q5_1 => each_block(bytes, out, |block, out| blocks::q5_1(block).write_with_minima(out)),
        Storage::Q8_0 => each_block(bytes, out, |block, out| blocks::q8_0(block).write_centred(128, out)),
        Storage::Q2K => each_block(bytes, out, q2_k),
        Storage::Q3K => each_block(bytes, out, q3_k),
        Storage::Q4K => each_block(bytes, out, |block, out| blocks::q4_k(block).write_with_minima(out)),
        Storage::Q5K => each_block(bytes, out, |block, out| blocks::q5_k(block).write_with_minima(out)),
        Storage::Q6K => each_block(bytes, out, |block, out| blocks::q6_k(block).write_centred(32, out)),
        Storage::Iq4Nl => each_block(bytes, out, |block, out| blocks::iq4_nl(block).write_centred(128, out)),
        Storage::Iq4Xs => each_block(bytes, out, iq4_xs),
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

fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 80), half_at(block, 82));
    let (groups, quants) = block[..80].split_at(16);
    let halves = quants.chunks_exact(32).zip(groups.chunks_exact(8));
    for (out, (quants, groups)) in out.chunks_exact_mut(128).zip(halves) {
        // Four runs of 32 elements, one for each pair of bits of a byte. Each group has 16 elements.
        for (run, out) in out.chunks_exact_mut(32).enumerate() {
            for (part, out) in out.chunks_exact_mut(16).enumerate() {
                let group = groups[run * 2 + part];
                let (scale, minimum) = (scale * f32::from(group & 15), minimum * f32::from(group >> 4));
                for (out, byte) in out.iter_mut().zip(&quants[part * 16..]) {
                    *out = scale * f32::from(byte >> (run * 2) & 3) - minimum;
                }
            }
        }
    }
}

fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let scale = half_at(block, 108);
    let (high_bits, rest) = block[..108].split_at(32);
    let (quants, packed) = rest.split_at(64);
    for (half, (out, quants)) in out.chunks_exact_mut(128).zip(quants.chunks_exact(32)).enumerate() {
        // Four runs of 32 elements as in Q2_K. Bit `half * 4 + run` of a byte of `high_bits` is the third bit.
        for (run, out) in out.chunks_exact_mut(32).enumerate() {
            for (part, out) in out.chunks_exact_mut(16).enumerate() {
                let group = half * 8 + run * 2 + part;
                // Low four bits in the nibbles of bytes 0..8, high two bits in bytes 8..12.
                let low = packed[group % 8] >> (group / 8 * 4) & 15;
                let high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
                let scale = scale * (f32::from(low | high << 4) - 32.0);
                let bytes = quants[part * 16..].iter().zip(&high_bits[part * 16..]);
                for (out, (low, high)) in out.iter_mut().zip(bytes) {
                    let quant = low >> (run * 2) & 3 | (high >> (half * 4 + run) & 1) << 2;
                    *out = scale * (f32::from(quant) - 4.0);
                }
            }
        }
    }
}

#[inline(always)]
fn iq4(scale: f32, indices: &[u8], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(indices) {
        *low = scale * f32::from(IQ4_VALUES[usize::from(byte & 15)]);
        *high = scale * f32::from(IQ4_VALUES[usize::from(byte >> 4)]);
    }
}

fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let scale = half_at(block, 0);
    let high_bits = u16::from_le_bytes([block[2], block[3]]);
    let indices = block[8..].chunks_exact(16);
    for (group, (out, indices)) in out.chunks_exact_mut(32).zip(indices).enumerate() {
        let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let high = (high_bits >> (group * 2) & 3) as u8;
        iq4(scale * (f32::from(low | high << 4) - 32.0), indices, out);
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
