//! Helpers of the tests: every kernel table, reproducible random floats, comparisons.

pub mod guarded;

use penstock_kernels::{Isa, Kernels, MatrixLayout};
use penstock_types::Dtype;

/// The kernels of each instruction set of this CPU.
pub fn all_kernels() -> impl Iterator<Item = Kernels> {
    Isa::available().map(|isa| Kernels::for_isa(isa).unwrap())
}

/// Whether multiply-adds are fused.
pub fn is_fused(kernels: &Kernels) -> bool {
    kernels.isa() != Isa::Portable || cfg!(any(target_arch = "aarch64", target_feature = "fma"))
}

/// The kernels with fused multiply-adds that do not round activations: float results of all of them have the same bits.
pub fn fused_kernels() -> impl Iterator<Item = Kernels> {
    all_kernels().filter(|kernels| is_fused(kernels) && kernels.isa() != Isa::Avx512Bf16)
}

/// `x` as a product of `kernels` with a matrix of `dtype` reads it.
pub fn as_read(kernels: &Kernels, dtype: Dtype, x: &[f32]) -> Vec<f32> {
    let rounds = kernels.isa() == Isa::Avx512Bf16 && dtype == Dtype::Bf16;
    x.iter().map(|x| if rounds { dtype.round(*x) } else { *x }).collect()
}

/// `count` floats in -1..1 drawn from `seed` (splitmix64).
pub fn random_floats(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// [`random_floats`] that `dtype` stores exactly.
pub fn random_stored(seed: u64, count: usize, dtype: Dtype) -> Vec<f32> {
    random_floats(seed, count).into_iter().map(|x| dtype.round(x)).collect()
}

/// `weights`, row-major, as panels.
pub fn pack(layout: MatrixLayout, weights: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xff; layout.bytes()];
    for (panel, out) in bytes.chunks_exact_mut(layout.panel_bytes()).enumerate() {
        let rows = layout.panel_rows(panel);
        layout.pack_panel(panel, &weights[rows.start * layout.columns..rows.end * layout.columns], out);
    }
    bytes
}

/// Panics unless every float of `got` is within `tolerance` (relative above 1, absolute below).
pub fn assert_close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * want.abs().max(1.0),
            "{what}: [{i}] is {got}, should be {want}"
        );
    }
}

/// Panics unless both have the same bits.
pub fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what}: [{i}] is {got}, should be {want}");
    }
}
