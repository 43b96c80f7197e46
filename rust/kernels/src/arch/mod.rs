//! One table of function pointers per instruction set.
//!
//! A table has the algorithms of `generic`, compiled for one implementation of the vector trait. Only the functions of
//! a table have target features, and only [`crate::Kernels`] reads a table, after it has checked that the instruction
//! set is available. An instruction set with a better algorithm for an operation (integer dot products, matrix tiles)
//! sets that entry to its own function.

#[cfg(target_arch = "aarch64")]
pub(crate) mod aarch64;
pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;

use std::ops::Range;

use crate::generic::attention::{AttentionJob, AttentionShape};
use crate::generic::grid::floats::{DecodedTile, GridFloatProduct};
use crate::generic::grid::{GridKernel, GridProduct};
use crate::generic::low_rank::{Expand, Shrink};
use crate::generic::matmul::Product;
use crate::generic::row_ops::Activation;
use crate::isa::Isa;
use crate::operand::OperandLayout;
use crate::simd::TileShapes;
use penstock_types::{CodeBits, Dtype, KvDtype};

pub(crate) type MatmulFn = unsafe fn(&Product<'_>, Range<usize>, Range<usize>);
pub(crate) type ShrinkFn = unsafe fn(&Shrink, Range<usize>, Range<usize>);
pub(crate) type ExpandFn = unsafe fn(&Expand, Range<usize>, Range<usize>);
pub(crate) type GridFloatMatmulFn = unsafe fn(&GridFloatProduct<'_>, Range<usize>, Range<usize>);
pub(crate) type CopyQueriesFn = unsafe fn(&AttentionShape, &AttentionJob<'_>, *mut f32);
pub(crate) type AttendSplitFn = unsafe fn(&AttentionShape, &AttentionJob<'_>, *const f32, usize, *mut f32);

/// The operations of one instruction set. The safety requirements of each are those of the function of the same name in
/// `generic`, and that the instruction set is available.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) tiles: TileShapes,
    pub(crate) matmul: PerDtype<MatmulFn>,
    pub(crate) shrink: PerDtype<ShrinkFn>,
    pub(crate) expand: PerDtype<ExpandFn>,
    pub(crate) prefetch: unsafe fn(*const u8, usize),
    pub(crate) grid_tiles: TileShapes,
    /// Products of rows of codes.
    pub(crate) grid_matmul: unsafe fn(&GridProduct<'_>, Range<usize>, Range<usize>),
    pub(crate) grid_kernels: PerBits<GridKernel>,
    /// Products of rows of floats.
    pub(crate) grid_float_matmul: PerBits<GridFloatMatmulFn>,
    pub(crate) multiply_decoded: unsafe fn(DecodedTile, usize, usize) -> usize,
    pub(crate) quantise_row: unsafe fn(&OperandLayout, *const f32, *mut u8),
    pub(crate) copy_queries: PerKvDtype<CopyQueriesFn>,
    pub(crate) attend_split: PerKvDtype<AttendSplitFn>,
    pub(crate) attention_merge: unsafe fn(&AttentionShape, &AttentionJob<'_>, usize, *const f32, *mut f32),
    pub(crate) attention_finish: unsafe fn(&AttentionShape, &AttentionJob<'_>, *mut f32),
    pub(crate) rms_norm: unsafe fn(*const f32, usize, &[f32], f32, *mut f32),
    pub(crate) gated: unsafe fn(Activation, *const f32, usize, *mut f32),
    pub(crate) rope: unsafe fn(*mut f32, usize, usize, &[f32], &[f32]),
    pub(crate) add: unsafe fn(&mut [f32], &[f32]),
    pub(crate) mask: unsafe fn(&mut [f32], &[u32]),
    pub(crate) max: unsafe fn(&[f32]) -> f32,
    pub(crate) argmax: unsafe fn(&[f32]) -> usize,
    pub(crate) sum: unsafe fn(&[f32]) -> f32,
    pub(crate) exp_weights: unsafe fn(&[f32], f32, f32, &mut [f32]) -> f32,
    pub(crate) sum_of_exp: unsafe fn(&[f32], f32, f32) -> f64,
}

#[cfg(test)]
impl Table {
    /// The table without the functions that read floats. The tables of all instruction sets would be most of the time
    /// in which the unit tests compile; the integration tests have them from the library.
    pub(crate) const fn only_codes(self) -> Self {
        const ABSENT: &str = "unit tests use integer codes";
        let matmul: MatmulFn = |_, _, _| unreachable!("{ABSENT}");
        let shrink: ShrinkFn = |_, _, _| unreachable!("{ABSENT}");
        let expand: ExpandFn = |_, _, _| unreachable!("{ABSENT}");
        let float: GridFloatMatmulFn = |_, _, _| unreachable!("{ABSENT}");
        let (copy, split) = (self.copy_queries, self.attend_split);
        Self {
            matmul: PerDtype { f32: matmul, f16: matmul, bf16: matmul },
            shrink: PerDtype { f32: shrink, f16: shrink, bf16: shrink },
            expand: PerDtype { f32: expand, f16: expand, bf16: expand },
            grid_kernels: PerBits { e4m3: self.grid_kernels.eight, ..self.grid_kernels },
            grid_float_matmul: PerBits { four: float, five: float, six: float, eight: float, e4m3: float },
            multiply_decoded: |_, _, _| unreachable!("{ABSENT}"),
            copy_queries: PerKvDtype { f32: copy.int8, f16: copy.int8, bf16: copy.int8, ..copy },
            attend_split: PerKvDtype { f32: split.int8, f16: split.int8, bf16: split.int8, ..split },
            ..self
        }
    }
}

/// One function for each dtype of weights.
#[derive(Clone, Copy)]
pub(crate) struct PerDtype<F> {
    f32: F,
    f16: F,
    bf16: F,
}

impl<F: Copy> PerDtype<F> {
    pub(crate) fn of(&self, dtype: Dtype) -> F {
        match dtype {
            Dtype::F32 => self.f32,
            Dtype::F16 => self.f16,
            Dtype::Bf16 => self.bf16,
        }
    }
}

/// One value for each type of code.
#[derive(Clone, Copy)]
pub(crate) struct PerBits<F> {
    four: F,
    five: F,
    six: F,
    eight: F,
    e4m3: F,
}

impl<F> PerBits<F> {
    pub(crate) fn of(&self, bits: CodeBits) -> &F {
        match bits {
            CodeBits::Four => &self.four,
            CodeBits::Five => &self.five,
            CodeBits::Six => &self.six,
            CodeBits::Eight => &self.eight,
            CodeBits::E4m3 => &self.e4m3,
        }
    }
}

/// One function for each dtype of the KV cache.
#[derive(Clone, Copy)]
pub(crate) struct PerKvDtype<F> {
    f32: F,
    f16: F,
    bf16: F,
    int8: F,
    uint4: F,
}

impl<F: Copy> PerKvDtype<F> {
    pub(crate) fn of(&self, dtype: KvDtype) -> F {
        match dtype {
            KvDtype::F32 => self.f32,
            KvDtype::F16 => self.f16,
            KvDtype::Bf16 => self.bf16,
            KvDtype::Int8 => self.int8,
            KvDtype::Uint4 => self.uint4,
        }
    }
}

/// The table of `isa`, which must be available.
pub(crate) fn table(isa: Isa) -> &'static Table {
    match isa {
        Isa::Portable => &portable::TABLE,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => &x86_64::avx2::TABLE,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => &x86_64::avx2::VNNI,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => &x86_64::avx512::TABLE,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => &x86_64::avx512::VNNI,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => &x86_64::avx512::BF16,
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => &x86_64::amx::TABLE,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => &aarch64::NEON,
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDotprod => &aarch64::DOTPROD,
        #[cfg(target_arch = "aarch64")]
        Isa::NeonI8mm => &aarch64::I8MM,
        _ => unreachable!("{isa} on this architecture; this is a bug"),
    }
}

/// Compiles every algorithm for one vector type: `table`, and a module of functions with the given target features.
macro_rules! compile_table {
    ($simd:ident from $new:expr, $(#[$features:meta])?) => {
        /// The table with these kinds of dot product for codes of up to 6 bits and of 8 bits, and with
        /// [`Simd::dot_pairs`]($crate::simd::Simd::dot_pairs) or without.
        const fn table<Few, EightBits, const DOT_PAIRS: bool>() -> $crate::arch::Table
        where
            Few: $crate::generic::grid::dot::Dot<$simd>,
            EightBits: $crate::generic::grid::dot::Dot<$simd>,
        {
            use $crate::arch::{PerBits, PerDtype, PerKvDtype, Table};
            use $crate::generic::attention::{floats::Floats, quantised::Quantised};
            use $crate::generic::grid::codes::{E4m3, Eight, Five, Four, Six};
            use $crate::generic::panel_dtype::{Bf16, F16, F32};
            Table {
                tiles: <$simd as $crate::simd::Simd>::TILES,
                matmul: PerDtype {
                    f32: entry::matmul::<F32>,
                    f16: entry::matmul::<F16>,
                    bf16: entry::matmul::<Bf16>,
                },
                shrink: PerDtype {
                    f32: entry::shrink::<F32>,
                    f16: entry::shrink::<F16>,
                    bf16: entry::shrink::<Bf16>,
                },
                expand: PerDtype {
                    f32: entry::expand::<F32>,
                    f16: entry::expand::<F16>,
                    bf16: entry::expand::<Bf16>,
                },
                prefetch: entry::prefetch,
                grid_tiles: <$simd as $crate::simd::Simd>::GRID_TILES,
                grid_matmul: entry::grid_matmul,
                grid_kernels: PerBits {
                    four: entry::grid_kernel::<Four, Few>(),
                    five: entry::grid_kernel::<Five, Few>(),
                    six: entry::grid_kernel::<Six, Few>(),
                    eight: entry::grid_kernel::<Eight, EightBits>(),
                    // Not called: floating-point codes have no integer products.
                    e4m3: entry::grid_kernel::<Eight, EightBits>(),
                },
                grid_float_matmul: PerBits {
                    four: entry::grid_float_matmul::<Four>,
                    five: entry::grid_float_matmul::<Five>,
                    six: entry::grid_float_matmul::<Six>,
                    eight: entry::grid_float_matmul::<Eight>,
                    e4m3: entry::grid_float_matmul::<E4m3>,
                },
                multiply_decoded: entry::multiply_decoded,
                quantise_row: entry::quantise_row,
                copy_queries: PerKvDtype {
                    f32: entry::copy_queries::<Floats<F32>>,
                    f16: entry::copy_queries::<Floats<F16>>,
                    bf16: entry::copy_queries::<Floats<Bf16>>,
                    int8: entry::copy_queries::<Quantised<8, DOT_PAIRS>>,
                    uint4: entry::copy_queries::<Quantised<4, DOT_PAIRS>>,
                },
                attend_split: PerKvDtype {
                    f32: entry::attend_split::<Floats<F32>>,
                    f16: entry::attend_split::<Floats<F16>>,
                    bf16: entry::attend_split::<Floats<Bf16>>,
                    int8: entry::attend_split::<Quantised<8, DOT_PAIRS>>,
                    uint4: entry::attend_split::<Quantised<4, DOT_PAIRS>>,
                },
                attention_merge: entry::attention_merge,
                attention_finish: entry::attention_finish,
                rms_norm: entry::rms_norm,
                gated: entry::gated,
                rope: entry::rope,
                add: entry::add,
                mask: entry::mask,
                max: entry::max,
                argmax: entry::argmax,
                sum: entry::sum,
                exp_weights: entry::exp_weights,
                sum_of_exp: entry::sum_of_exp,
            }
        }

        /// The algorithms, compiled with the features of this instruction set.
        mod entry {
            use super::*;
            use $crate::generic::attention::KvFormat;
            use $crate::generic::panel_dtype::PanelDtype;
            use $crate::generic::grid::{self, codes::Codes, dot::Dot, floats, quantise};
            use $crate::generic::attention::softmax;
            use $crate::generic::{attention, low_rank, matmul as product, reduce, row_ops};
            use $crate::operand::OperandLayout;

            $(#[$features])?
            unsafe fn grid_tile<C: Codes, D: Dot<$simd>, const T: usize, const P: usize>(call: &grid::TileCall<'_>) {
                // SAFETY: the caller meets the algorithm's requirements, and the instruction set is available.
                unsafe { grid::grid_tile::<$simd, C, D, T, P>($new, call) }
            }

            /// Only the tiles whose addresses are in the result are compiled.
            pub(super) const fn grid_kernel<C: Codes, D: Dot<$simd>>() -> grid::GridKernel {
                const SHAPES: $crate::simd::TileShapes = <$simd as $crate::simd::Simd>::GRID_TILES;
                const fn at_once(rows: usize) -> usize {
                    if rows > SHAPES.max_rows() { 1 } else { SHAPES.panels_at_once(rows) }
                }
                macro_rules! row {
                    ($rows:literal) => {
                        if $rows > SHAPES.max_rows() {
                            [grid_tile::<C, D, 1, 1> as grid::GridTileFn; 2]
                        } else {
                            [
                                grid_tile::<C, D, $rows, 1> as grid::GridTileFn,
                                grid_tile::<C, D, $rows, { at_once($rows) }>,
                            ]
                        }
                    };
                }
                grid::GridKernel {
                    tiles: [
                        row!(1), row!(2), row!(3), row!(4), row!(5), row!(6), row!(7), row!(8),
                        row!(9), row!(10), row!(11), row!(12), row!(13), row!(14), row!(15), row!(16),
                    ],
                    shapes: SHAPES,
                    is_wide: D::WIDE,
                    smallest_group: C::SMALLEST_GROUP,
                    block_bytes: C::BLOCK_BYTES,
                }
            }

            $crate::arch::compile_entries! {
                $simd, $new, $(#[$features])?
                fn matmul<E: PanelDtype>(p: &product::Product<'_>, panels: std::ops::Range<usize>, tiles: std::ops::Range<usize>)
                    = product::matmul;
                fn shrink<E: PanelDtype>(call: &low_rank::Shrink, tokens: std::ops::Range<usize>, rows: std::ops::Range<usize>)
                    = low_rank::shrink;
                fn expand<E: PanelDtype>(call: &low_rank::Expand, panels: std::ops::Range<usize>, tokens: std::ops::Range<usize>)
                    = low_rank::expand;
                fn prefetch(at: *const u8, bytes: usize) = low_rank::prefetch;
                fn grid_matmul(p: &grid::GridProduct<'_>, panels: std::ops::Range<usize>, tiles: std::ops::Range<usize>)
                    = grid::grid_matmul;
                fn grid_float_matmul<C: Codes>(p: &floats::GridFloatProduct<'_>, panels: std::ops::Range<usize>, tiles: std::ops::Range<usize>)
                    = floats::grid_float_matmul;
                fn multiply_decoded(tile: floats::DecodedTile, rows: usize, left: usize) -> usize
                    = floats::multiply_decoded;
                fn quantise_row(layout: &OperandLayout, x: *const f32, row: *mut u8) = quantise::quantise_row;
                fn copy_queries<F: KvFormat>(
                    shape: &attention::AttentionShape, job: &attention::AttentionJob<'_>, queries: *mut f32
                ) = attention::copy_queries;
                fn attend_split<F: KvFormat>(
                    shape: &attention::AttentionShape, job: &attention::AttentionJob<'_>, queries: *const f32,
                    split: usize, partial: *mut f32
                ) = attention::attend_split;
                fn attention_merge(
                    shape: &attention::AttentionShape, job: &attention::AttentionJob<'_>, split: usize,
                    partial: *const f32, total: *mut f32
                ) = softmax::merge;
                fn attention_finish(shape: &attention::AttentionShape, job: &attention::AttentionJob<'_>, total: *mut f32)
                    = softmax::finish;
                fn rms_norm(x: *const f32, width: usize, weight: &[f32], eps: f32, out: *mut f32) = row_ops::rms_norm;
                fn gated(activation: row_ops::Activation, x: *const f32, f: usize, out: *mut f32) = row_ops::gated;
                fn rope(x: *mut f32, width: usize, head_dim: usize, cos: &[f32], sin: &[f32]) = row_ops::rope;
                fn add(x: &mut [f32], y: &[f32]) = row_ops::add;
                fn mask(x: &mut [f32], words: &[u32]) = row_ops::mask;
                fn max(x: &[f32]) -> f32 = reduce::max;
                fn argmax(x: &[f32]) -> usize = reduce::argmax;
                fn sum(x: &[f32]) -> f32 = reduce::sum;
                fn exp_weights(x: &[f32], shift: f32, factor: f32, out: &mut [f32]) -> f32 = reduce::exp_weights;
                fn sum_of_exp(x: &[f32], shift: f32, factor: f32) -> f64 = reduce::sum_of_exp;
            }
        }
    };
}
pub(crate) use compile_table;

/// `fn name(arguments) = algorithm;` becomes a function with the features that calls `algorithm(simd, arguments)`.
macro_rules! compile_entries {
    ($simd:ident, $new:expr, $(#[$features:meta])?) => {};
    ($simd:ident, $new:expr, $(#[$features:meta])?
     fn $name:ident<$kind:ident: $bound:ident>($($argument:ident: $type:ty),*) = $module:ident::$algorithm:ident; $($rest:tt)*) => {
        $(#[$features])?
        pub(super) unsafe fn $name<$kind: $bound>($($argument: $type),*) {
            // SAFETY: the caller meets the algorithm's requirements, and the instruction set is available.
            unsafe { $module::$algorithm::<$simd, $kind>($new, $($argument),*) }
        }
        $crate::arch::compile_entries! { $simd, $new, $(#[$features])? $($rest)* }
    };
    ($simd:ident, $new:expr, $(#[$features:meta])?
     fn $name:ident($($argument:ident: $type:ty),*) $(-> $output:ty)? = $module:ident::$algorithm:ident;
     $($rest:tt)*) => {
        $(#[$features])?
        pub(super) unsafe fn $name($($argument: $type),*) $(-> $output)? {
            // SAFETY: the caller meets the algorithm's requirements, and the instruction set is available.
            #[allow(unused_unsafe)]
            unsafe { $module::$algorithm::<$simd>($new, $($argument),*) }
        }
        $crate::arch::compile_entries! { $simd, $new, $(#[$features])? $($rest)* }
    };
}
pub(crate) use compile_entries;
