//! The vector trait over which the algorithms in `generic` are written.
//!
//! A vector always has 16 lanes, in as many registers as the instruction set needs (two with AVX2, one with AVX-512,
//! four with NEON). So the order of every reduction is the same everywhere, and results of two instruction sets differ
//! only if one fuses multiply-adds and the other does not.
//!
//! A value of a `Simd` type proves that the CPU has the instructions, because only the functions of an available
//! [`crate::Isa`] construct it. This makes the arithmetic methods safe. All functions here and in `generic` are
//! `inline(always)` and free of closures, so that they compile into the functions of `arch`, which have the target
//! features.

use half::bf16;

use crate::panel::LANES;

pub(crate) trait Simd: Copy {
    /// The shapes of the tiles of grid products: at most 6 rows and 2 panels.
    const GRID_TILES: TileShapes;

    /// Whether the registers hold 16 accumulators beside 5 other vectors: the tiles of
    /// [`shrink`](crate::generic::low_rank::shrink) are then of 4 tokens and 4 rows instead of 2 and 2.
    const WIDE_SHRINK: bool = false;

    /// Whether [`mul_add`](Self::mul_add) rounds once.
    const IS_FUSED: bool = true;

    /// 16 lanes of f32.
    type V: Copy;
    /// 16 lanes of 32 bits: an i32, or two 16-bit halves.
    type I: Copy;

    /// The tile shapes of f32 products; see [`tile_shapes`](crate::generic::tile::tile_shapes).
    const TILES: TileShapes;

    /// Calls `tile` for `rows` rows and [`panels_at_once`](TileShapes::panels_at_once) panels, or one panel if fewer
    /// are `left`. Returns the number of panels.
    ///
    /// # Safety
    /// `tile` can be called for this number of rows and for as many panels.
    unsafe fn call_tile<F: TileFn<Self>>(self, rows: usize, left: usize, tile: F) -> usize;

    fn splat(self, value: f32) -> Self::V;
    #[inline(always)]
    fn vector(self, lanes: [f32; LANES]) -> Self::V {
        // SAFETY: the array has the 16 floats that are read.
        unsafe { self.load(lanes.as_ptr()) }
    }
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has room for the 16 floats that are written.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        lanes
    }

    /// # Safety
    /// 16 floats are readable at `from`; no alignment needed.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// 16 floats are writable at `to`; no alignment needed.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// 16 halves to f32.
    /// # Safety
    /// 32 bytes are readable at `from`; no alignment needed.
    unsafe fn load_f16(self, from: *const u8) -> Self::V;
    /// The low halves of 16 pairs of bf16.
    /// # Safety
    /// 64 bytes are readable at `from`; no alignment needed.
    #[inline(always)]
    unsafe fn load_bf16_low(self, from: *const u8) -> Self::V {
        // SAFETY: by contract.
        unsafe { self.load_bits(from, 16, !0) }
    }
    /// The high halves of 16 pairs of bf16.
    /// # Safety
    /// 64 bytes are readable at `from`; no alignment needed.
    #[inline(always)]
    unsafe fn load_bf16_high(self, from: *const u8) -> Self::V {
        // SAFETY: by contract.
        unsafe { self.load_bits(from, 0, 0xffff_0000) }
    }
    /// Prefetches the cache line at `at`, which may be any address, into L2: more reads from memory can be in flight
    /// there than in L1.
    fn prefetch(self, at: *const u8);

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once if the instruction set has a fused multiply-add.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Column `k` of row `t` times `b`, plus `c`, in every lane; rounded once if the instruction set has a fused
    /// multiply-add.
    /// # Safety
    /// Row `t` has column `k`.
    #[inline(always)]
    unsafe fn mul_add_broadcast<const T: usize>(
        self,
        rows: &TileRows<T>,
        t: usize,
        k: usize,
        b: Self::V,
        c: Self::V,
    ) -> Self::V {
        // SAFETY: by contract.
        self.mul_add(self.splat(unsafe { *rows.at[t].add(k) }), b, c)
    }
    /// Pair `pair` of row `t`, two bf16, times the pairs of bf16 at `weights`, plus `c`: the product of the second of a
    /// pair is added first. Subnormal numbers may count as 0.
    /// # Safety
    /// Row `t` has the pair; 64 bytes are readable at `weights`; the CPU has the instruction, if it is one.
    #[inline(always)]
    unsafe fn dot_bf16<const T: usize>(
        self,
        rows: &TileRows<T>,
        t: usize,
        pair: usize,
        weights: *const u8,
        c: Self::V,
    ) -> Self::V {
        // SAFETY: by contract.
        let (x, low, high) = unsafe {
            let x = rows.at[t].add(pair).cast::<[u16; 2]>().read_unaligned();
            (x, self.load_bf16_low(weights), self.load_bf16_high(weights))
        };
        let x = x.map(|x| self.splat(f32::from_bits(u32::from(x) << 16)));
        self.mul_add(x[0], low, self.mul_add(x[1], high, c))
    }
    /// Rounds to bf16, ties to even. A subnormal number may become 0.
    /// # Safety
    /// 16 bf16 are writable at `to`, no alignment needed; the CPU has the instruction, if it is one.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, v: Self::V) {
        let mut bits = [0; LANES];
        for (bits, lane) in bits.iter_mut().zip(self.to_array(v)) {
            *bits = bf16::from_f32(lane).to_bits();
        }
        // SAFETY: writable by contract; write_unaligned requires nothing else.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(bits) }
    }
    /// `c - a * b`, rounded once if the instruction set has a fused multiply-add.
    fn neg_mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`, so `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`, so `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Lane i of `a` if bit i is set, else of `b`. Bits from 16 on are ignored.
    fn select(self, bits: u32, a: Self::V, b: Self::V) -> Self::V;
    /// Lane i of the result is lane i ^ `half`, for `half` 1, 2, 4 or 8.
    #[inline(always)]
    fn exchange(self, v: Self::V, half: usize) -> Self::V {
        let lanes = self.to_array(v);
        let mut exchanged = [0.0; LANES];
        for (i, lane) in exchanged.iter_mut().enumerate() {
            *lane = lanes[i ^ half];
        }
        self.vector(exchanged)
    }
    /// Rounds to the nearest integer, ties to even, for |a| < 2^22.
    fn round(self, a: Self::V) -> Self::V;
    /// 2^n for integers n in -126..=127.
    fn exp2(self, n: Self::V) -> Self::V;

    fn zeros(self) -> Self::I;
    /// 16 words, little-endian.
    /// # Safety
    /// 64 bytes are readable at `from`; no alignment needed.
    unsafe fn load_words(self, from: *const u8) -> Self::I;
    /// `half >> shift & mask` of both halves of every lane.
    fn halves(self, words: Self::I, shift: u32, mask: u16) -> Self::I;
    /// `2 c + (half >> 15)` of both halves of every lane, modulo 2^16.
    fn add_top_bits(self, words: Self::I, c: Self::I) -> Self::I;
    /// The floats with the bits `word << left & mask` of 16 words.
    /// # Safety
    /// 64 bytes are readable at `from`; no alignment needed.
    unsafe fn load_bits(self, from: *const u8, left: u32, mask: u32) -> Self::V;
    /// `row[2 pair] * low half + row[2 pair + 1] * high half + c` in every lane, modulo 2^32; the halves are signed.
    /// # Safety
    /// Both integers of the row are readable.
    unsafe fn add_products(self, row: *const i16, pair: usize, halves: Self::I, c: Self::I) -> Self::I;
    /// As [`add_products`](Self::add_products), with one instruction if the type has it.
    /// # Safety
    /// Both integers of the row are readable; the CPU has the instruction.
    #[inline(always)]
    unsafe fn dot_pairs(self, row: *const i16, pair: usize, halves: Self::I, c: Self::I) -> Self::I {
        // SAFETY: by contract.
        unsafe { self.add_products(row, pair, halves, c) }
    }
    /// The low half of every byte of 16 words, or the high half.
    /// # Safety
    /// 64 bytes are readable at `from`; no alignment needed.
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, high: bool) -> Self::I {
        // SAFETY: by contract.
        self.halves(unsafe { self.load_words(from) }, if high { 4 } else { 0 }, 0x0f0f)
    }
    /// The low byte of every 16 bits of 16 words, or the high byte, as 16 bits.
    /// # Safety
    /// 64 bytes are readable at `from`; no alignment needed.
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8, high: bool) -> Self::I {
        // SAFETY: by contract.
        self.halves(unsafe { self.load_words(from) }, if high { 8 } else { 0 }, 0x00ff)
    }
    /// `-(sum << shift)` in every lane; 0 if the shift is 32.
    /// # Safety
    /// The integer is readable at `sum`.
    unsafe fn neg_shifted(self, sum: *const i32, shift: u32) -> Self::I;
    /// `half << shift & mask` of both halves of every lane.
    fn halves_up(self, words: Self::I, shift: u32, mask: u16) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Byte `index` of every lane.
    fn byte(self, words: Self::I, index: u32) -> Self::I;
    /// Rounds to the nearest f32, ties to even.
    fn to_f32(self, i: Self::I) -> Self::V;
    /// Byte `index` of every lane, an E4M3 number, times `2^-120`: a float32 with the same sign and with the exponent
    /// and the mantissa at bit 20. The result for a NaN is unspecified.
    #[inline(always)]
    fn e4m3(self, words: Self::I, index: u32) -> Self::V {
        let mut lanes = self.to_array(self.to_f32(self.byte(words, index)));
        for lane in &mut lanes {
            let code = *lane as u32;
            *lane = f32::from_bits((code & 0x80) << 24 | (code & 0x7f) << 20);
        }
        self.vector(lanes)
    }
    /// Stores integers from -2^15 to 2^15 - 1. The result for any other value is unspecified, but a function of that
    /// lane alone.
    /// # Safety
    /// 16 integers are writable at `to`; no alignment needed.
    unsafe fn store_i16(self, to: *mut i16, v: Self::V);

    /// The first `count` (at most 16) floats at `from`; the other lanes are `rest`.
    /// # Safety
    /// `count` floats are readable at `from`.
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize, rest: f32) -> Self::V {
        let mut lanes = [rest; LANES];
        // SAFETY: `count` floats are readable by contract, and at most 16 are copied into 16.
        unsafe { std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count.min(LANES)) };
        self.vector(lanes)
    }

    /// Writes the first `count` (at most 16) lanes to `to`.
    /// # Safety
    /// `count` floats are writable at `to`.
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize, v: Self::V) {
        let lanes = self.to_array(v);
        // SAFETY: `count` floats are writable by contract, and at most 16 are copied out of 16.
        unsafe { std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count.min(LANES)) };
    }

    /// The sum of the lanes, halves first: lane i + lane i + 8, then + 4, + 2, + 1.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let v = self.add(v, self.exchange(v, 8));
        let v = self.add(v, self.exchange(v, 4));
        let v = self.add(v, self.exchange(v, 2));
        self.to_array(self.add(v, self.exchange(v, 1)))[0]
    }

    /// The largest lane, in the same order as [`sum`](Simd::sum).
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        let v = self.max(v, self.exchange(v, 8));
        let v = self.max(v, self.exchange(v, 4));
        let v = self.max(v, self.exchange(v, 2));
        self.to_array(self.max(v, self.exchange(v, 1)))[0]
    }
}

/// The bits of [`Simd::e4m3`]: the sign, 4 bits of exponent and 3 of mantissa.
pub(crate) const E4M3_BITS: u32 = 0x87f0_0000;

/// Products of bytes with 16-bit sums.
pub(crate) trait ShortSums: Simd {
    /// 32 sums of 16 bits, two in each lane of 32 bits.
    type Short: Copy;

    fn short_zeros(self) -> Self::Short;
    /// Adds the products of bytes 0 and 1, and those of bytes 2 and 3, of each lane of `codes` (unsigned) and of quad
    /// `quad` of the row (signed). No sum may exceed 16 bits.
    /// # Safety
    /// The four bytes of the row are readable.
    unsafe fn add_short(self, row: *const i8, quad: usize, codes: Self::I, short: Self::Short)
    -> Self::Short;
    /// Adds both sums of each lane to `c`.
    fn add_pairs(self, short: Self::Short, c: Self::I) -> Self::I;
}

/// Products of bytes with 32-bit sums.
pub(crate) trait DotQuads: Simd {
    /// Adds the products of the four bytes of each lane of `codes` (unsigned) and of quad `quad` of the row (signed).
    /// # Safety
    /// The CPU has the instruction, which the type alone does not prove; the four bytes of the row are readable.
    unsafe fn dot_quads(self, row: *const i8, quad: usize, codes: Self::I, c: Self::I) -> Self::I;
}

/// The tile shapes of an instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileShapes {
    /// For each number of rows from 1 on, the number of panels.
    pub(crate) panels: &'static [usize],
}

impl TileShapes {
    /// Maximum number of rows of a tile.
    #[inline(always)]
    pub(crate) const fn max_rows(&self) -> usize {
        self.panels.len()
    }

    /// The number of panels that a tile of `rows` rows, at least 1, processes at a time.
    #[inline(always)]
    pub(crate) const fn panels_at_once(&self, rows: usize) -> usize {
        self.panels[rows - 1]
    }
}

/// A function generic over the shape of a tile. Not a closure, which would not inherit target features.
pub(crate) trait TileFn<S: Simd> {
    /// Maximum number of rows of a call.
    const MAX_ROWS: usize = usize::MAX;

    /// # Safety
    /// As the implementation requires, for `T` rows and `P` panels.
    unsafe fn call<const T: usize, const P: usize>(self, s: S);
}

/// The rows of a tile, `stride` floats apart.
#[derive(Clone, Copy)]
pub(crate) struct TileRows<const T: usize> {
    pub(crate) at: [*const f32; T],
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for the addressing of x86-64"))]
    pub(crate) stride: usize,
}
