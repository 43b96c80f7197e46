//! One sequence with its cache, its outputs and the reference.

use penstock_kernels::{
    AttentionCodes, Kernels, KvLayout, Pool, Rows, RowsMut, attention_scratch, reference,
};
use penstock_types::{
    Activations, AttentionParams, AttentionRow, CodeBits, Grid, KvDtype, Minimum, ScaleFormat, WeightFormat,
};
use proptest::prelude::*;

use crate::common::*;

/// A sequence and its cache. All bytes of the cache that are not the sequence's are NaN.
pub struct Case {
    pub layout: KvLayout,
    pub heads: usize,
    pub params: AttentionParams,
    pub positions: usize,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub cache: Vec<u8>,
    pub blocks: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub positions: usize,
    pub head_dim: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub block_size: usize,
    pub dtype: KvDtype,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
}

/// The format of a matrix that reads codes.
const INT8: WeightFormat = WeightFormat::Grid(Grid {
    bits: CodeBits::Eight,
    group: Some(32),
    scales: ScaleFormat::F16,
    minimum: Minimum::Centred,
    activations: Activations::Int8,
});

pub const PLAIN: Spec = Spec {
    positions: 600,
    head_dim: 64,
    kv_heads: 2,
    group: 7,
    block_size: 16,
    dtype: KvDtype::Bf16,
    window: None,
    softcap: None,
};

impl Case {
    pub fn new(spec: Spec, seed: u64) -> Case {
        let Spec { positions, head_dim, kv_heads, group, block_size, dtype, window, softcap } = spec;
        let layout = KvLayout { block_size, kv_heads, head_dim, dtype };
        let heads = kv_heads * group;
        let used = positions.div_ceil(block_size);
        // Every other block of the cache, in descending order.
        let blocks: Vec<u32> = (0..used).map(|i| 2 * (used - i) as u32 - 1).collect();
        let mut case = Case {
            layout,
            heads,
            params: AttentionParams { scale: (head_dim as f32).sqrt().recip(), window, softcap },
            positions,
            q: random_floats(seed, positions * heads * head_dim).into_iter().map(|x| 3.0 * x).collect(),
            k: random_floats(seed + 1, positions * kv_heads * head_dim),
            v: random_floats(seed + 2, positions * kv_heads * head_dim),
            cache: vec![0xff; 2 * used * layout.block_bytes()],
            blocks,
        };
        case.fill_cache();
        case
    }

    /// Writes all keys and values to the cache, and replaces them by the stored values.
    pub fn fill_cache(&mut self) {
        let layout = self.layout;
        let width = layout.kv_heads * layout.head_dim;
        let tokens = self.k.chunks_exact_mut(width).zip(self.v.chunks_exact_mut(width));
        for (position, (k, v)) in tokens.enumerate() {
            let block = self.blocks[position / layout.block_size];
            let offset = position % layout.block_size;
            Kernels::best().write_kv(&layout, &mut self.cache, block, offset, k, v);
            let read = layout.read(&self.cache, block, offset);
            k.copy_from_slice(&read.0);
            v.copy_from_slice(&read.1);
        }
    }

    pub fn width(&self) -> usize {
        self.heads * self.layout.head_dim
    }

    pub fn row(
        &self,
        first_query: usize,
        positions: std::ops::Range<usize>,
        blocks: std::ops::Range<usize>,
    ) -> AttentionRow {
        AttentionRow { first_query, num_queries: positions.len(), start: positions.start, blocks }
    }

    /// The outputs of `positions`, computed `chunk` at a time.
    pub fn outputs(
        &self,
        kernels: &Kernels,
        pool: &Pool,
        positions: std::ops::Range<usize>,
        chunk: usize,
    ) -> Vec<f32> {
        let mut scratch = vec![0.0; attention_scratch(self.heads, self.layout.head_dim, self.positions)];
        self.outputs_with(kernels, pool, positions, chunk, &mut scratch)
    }

    pub fn outputs_with(
        &self,
        kernels: &Kernels,
        pool: &Pool,
        positions: std::ops::Range<usize>,
        chunk: usize,
        scratch: &mut [f32],
    ) -> Vec<f32> {
        let width = self.width();
        let mut all = Vec::new();
        for start in positions.clone().step_by(chunk) {
            let end = positions.end.min(start + chunk);
            let mut out = vec![f32::NAN; (end - start) * width];
            let row = self.row(0, start..end, 0..self.blocks.len());
            let q = Rows::dense(&self.q[start * width..end * width], width);
            let layout = kernels.operand_layout([INT8].into_iter(), width).expect("codes");
            let mut codes = vec![0xff; (end - start) * layout.row_bytes()];
            let mut counters = vec![u32::MAX; end - start + 1];
            kernels.attention(
                pool,
                &self.layout,
                &self.cache,
                &[row],
                &self.blocks,
                q,
                self.heads,
                self.params,
                scratch,
                RowsMut::dense(&mut out, width),
                Some(AttentionCodes { layout: &layout, codes: &mut codes, counters: &mut counters }),
            );
            let mut expected = vec![0xff; codes.len()];
            kernels.quantise(pool, Rows::dense(&out, width), &layout, &mut expected);
            assert!(codes == expected, "codes of {:?} on {kernels:?}", self.layout);
            all.extend(out);
        }
        all
    }

    pub fn reference(&self, positions: std::ops::Range<usize>) -> Vec<f32> {
        let Self { layout: KvLayout { kv_heads, head_dim, .. }, heads, params, .. } = *self;
        let mut out = Vec::new();
        for position in positions {
            let first = params.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..heads {
                let part = |x: &[f32]| -> Vec<f32> {
                    let kv_head = head / (heads / kv_heads);
                    let seen = x.chunks_exact(head_dim).skip(kv_head).step_by(kv_heads);
                    seen.skip(first).take(position + 1 - first).flatten().copied().collect()
                };
                let q = &self.q[(position * heads + head) * head_dim..][..head_dim];
                out.extend(reference::attention(
                    q,
                    &part(&self.k),
                    &part(&self.v),
                    params.scale,
                    params.softcap,
                ));
            }
        }
        out
    }
}

/// The tolerance of attention against the reference over the same keys and values.
pub fn tolerance(dtype: KvDtype, softcap: Option<f32>) -> f32 {
    let sums = match dtype {
        KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => 3e-6,
        // The query and the weights have 16 bits: each of 16 lanes of a split may be off by half a step of 2^-15.
        KvDtype::Int8 | KvDtype::Uint4 => 3e-4,
    };
    // The cap multiplies the rounding error of tanh, and a weight is the exponential of the product.
    sums + softcap.unwrap_or(0.0) * f32::EPSILON
}

pub fn spec() -> impl Strategy<Value = Spec> {
    (
        (1usize..600, prop::sample::select(vec![1usize, 20, 32, 64, 80, 96, 128]), 1usize..3, 1usize..9),
        prop::sample::select(vec![16usize, 32, 48, 64, 128]),
        prop::sample::select(KvDtype::ALL),
        prop::option::of(1usize..400),
        prop::option::of(5.0f32..50.0),
    )
        .prop_map(|((positions, head_dim, kv_heads, group), block_size, dtype, window, softcap)| Spec {
            positions,
            head_dim,
            kv_heads,
            group,
            block_size,
            dtype,
            window,
            softcap,
        })
}
