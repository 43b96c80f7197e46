//! Loading of two steps of a panel as vectors; one marker type per [`Dtype`].

use penstock_types::Dtype;

use crate::panel::panel_bytes;
use crate::simd::Simd;

/// Panels store steps in pairs, see `panel`: `even` reads the first of a pair, `odd` the second.
pub(crate) trait PanelDtype: Copy {
    const DTYPE: Dtype;
    /// Bytes of a pair of steps.
    const PAIR: usize = panel_bytes(Self::DTYPE, 2);
    /// Whether the rows of a product are rounded to bf16, and a pair of steps is one [`Simd::dot_bf16`].
    const ROUNDS_ROWS: bool = false;

    /// # Safety
    /// A whole pair (`PAIR` bytes) is readable at `pair`.
    unsafe fn even<S: Simd>(s: S, pair: *const u8) -> S::V;
    /// # Safety
    /// As for `even`.
    unsafe fn odd<S: Simd>(s: S, pair: *const u8) -> S::V;
}

#[derive(Clone, Copy)]
pub(crate) struct F32;
#[derive(Clone, Copy)]
pub(crate) struct F16;
#[derive(Clone, Copy)]
pub(crate) struct Bf16;
/// Bf16 panels, for rows of bf16.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only AVX-512 has the instruction"))]
pub(crate) struct Bf16Pairs;

impl PanelDtype for F32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    unsafe fn even<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: the first half of the pair.
        unsafe { s.load(pair.cast()) }
    }

    #[inline(always)]
    unsafe fn odd<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: the second half of the pair.
        unsafe { s.load(pair.add(Self::PAIR / 2).cast()) }
    }
}

impl PanelDtype for F16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    unsafe fn even<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: the first half of the pair.
        unsafe { s.load_f16(pair) }
    }

    #[inline(always)]
    unsafe fn odd<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: the second half of the pair.
        unsafe { s.load_f16(pair.add(Self::PAIR / 2)) }
    }
}

impl PanelDtype for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;

    #[inline(always)]
    unsafe fn even<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: the low halves of the pair's 16 lanes.
        unsafe { s.load_bf16_low(pair) }
    }

    #[inline(always)]
    unsafe fn odd<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: the high halves of the pair's 16 lanes.
        unsafe { s.load_bf16_high(pair) }
    }
}

impl PanelDtype for Bf16Pairs {
    const DTYPE: Dtype = Dtype::Bf16;
    const ROUNDS_ROWS: bool = true;

    #[inline(always)]
    unsafe fn even<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: by contract.
        unsafe { Bf16::even(s, pair) }
    }

    #[inline(always)]
    unsafe fn odd<S: Simd>(s: S, pair: *const u8) -> S::V {
        // SAFETY: by contract.
        unsafe { Bf16::odd(s, pair) }
    }
}
