//! The CPU backend: weights as packed panels, activations as plain float32, every operation a call into
//! `penstock-kernels` on one worker pool. Only sampling has arithmetic of its own (`sampling/`).
//!
//! Every buffer is a region of one arena, which lends the bytes to an operation for as long as it runs. No region is freed
//! before the backend ends, so fresh memory is zero, and costs nothing before it is written.

mod cache;
mod groups;
mod memory;
mod sampling;

use std::mem::size_of;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use bytemuck::{cast_slice, cast_slice_mut};
use penstock_kernels::{Kernels, Matrix, MatrixLayout, Pool, Rows, RowsMut, SPLIT, attention_scratch};
use penstock_types::{AttentionParams, BlockCopy, Dtype, Epilogue, HeadShape};

use crate::arena::{Arena, ArenaError, HostSlab, Region, SlabError};
use crate::backend::{Backend, CacheSpec, DeviceError, MemoryUse, RowSource};
use crate::bfc::Placement;
use crate::sample::{SampleParams, Sampled};
use crate::step::{StepInputs, StepSpec};
pub use cache::CpuCache;
use cache::{CacheShape, kv_layout};
pub use penstock_kernels::IsaError;
pub use sampling::probabilities_for_testing;

/// Alignment of every buffer: a panel of weights lies in as few pages as can be.
const PAGE: usize = 4096;
/// Positions for which splits of a long sequence's attention can be computed apart.
const MOST_SCRATCH_POSITIONS: usize = 1 << 20;

/// The CPU.
pub struct Cpu {
    kernels: Kernels,
    pool: Pool,
    /// As small as can be until memory is reserved.
    arena: Arena<HostSlab>,
}

/// A weight in panels.
pub struct CpuMatrix {
    layout: MatrixLayout,
    region: Region,
}

/// Float32 values.
pub struct CpuBuffer(Region);

/// What operations need while they run.
pub struct CpuScratch {
    /// Partial results of attention.
    attention: Region,
    /// What each worker needs to sample a row.
    sampling: Region,
}

impl Cpu {
    /// A backend on `threads` threads, the one that calls it included, with the instruction set that `PENSTOCK_ISA` names or
    /// else the best there is.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        let pool = Pool::new(threads).map_err(|error| DeviceError::Start(error.to_string()))?;
        Ok(Self { kernels: Kernels::from_environment()?, pool, arena: arena(PAGE)? })
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Instruction set, as `PENSTOCK_ISA` spells it.
    pub fn isa(&self) -> &'static str {
        self.kernels.isa().name()
    }

    /// Bytes that `bytes` take in the arena.
    fn granted(&self, bytes: usize) -> u64 {
        self.arena.bfc().granted(bytes).map_or(u64::MAX, |granted| granted as u64)
    }

    /// A region for `len` elements of `size` bytes.
    fn region(
        &mut self,
        len: usize,
        size: usize,
        placement: Placement,
        name: &'static str,
    ) -> Result<Region, DeviceError> {
        Ok(self.arena.allocate(len.saturating_mul(size), placement, name)?)
    }

    /// Floats of the scratch regions: for attention, and for sampling.
    fn scratch_lens(&self, spec: &StepSpec) -> (usize, usize) {
        let HeadShape { heads, kv_heads, head_dim } = spec.heads;
        // Attention is spread only while it has fewer than four jobs a thread, and a sequence has one for each kv head.
        let spread = spec.sequences.min((4 * self.threads()).div_ceil(kv_heads));
        let positions = spread.saturating_mul(spec.positions.div_ceil(SPLIT)).saturating_mul(SPLIT);
        let attention = attention_scratch(heads, head_dim, positions.min(MOST_SCRATCH_POSITIONS));
        (attention, self.threads().saturating_mul(sampling::Scratch::len(spec.vocabulary)))
    }
}

/// An empty arena of `bytes`.
fn arena(bytes: usize) -> Result<Arena<HostSlab>, DeviceError> {
    let refused = |reason: String| DeviceError::OutOfMemory {
        what: "the model with its KV cache",
        bytes: bytes as u64,
        reason,
    };
    let slab = HostSlab::reserve(bytes).map_err(|SlabError { reason, .. }| refused(reason))?;
    Arena::new(slab, bytes, PAGE).map_err(|error: ArenaError| refused(error.to_string()))
}

const FOREIGN: &str = "a buffer of another backend; this is a bug";

/// The bytes of buffers, which are all of this arena, because nobody else can make one, and all different, because some are
/// borrowed for writing.
fn lend<'a, const N: usize>(arena: &'a mut Arena<HostSlab>, regions: [&Region; N]) -> [&'a mut [u8]; N] {
    arena.split_mut(regions).expect(FOREIGN)
}

/// Why there is no CPU backend.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// `PENSTOCK_ISA` cannot be honoured.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// The threads did not start.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Columns of the query, key and value part of a row.
fn parts(shape: HeadShape) -> [Range<usize>; 3] {
    let (query, kv) = (shape.query_width(), shape.kv_width());
    [0..query, query..query + kv, query + kv..query + 2 * kv]
}

/// The next of what several workers take from.
fn next<I: Iterator>(shared: &Mutex<I>) -> Option<I::Item> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).next()
}

impl Backend for Cpu {
    type Matrix = CpuMatrix;
    type Vector = CpuBuffer;
    type Buffer = CpuBuffer;
    type Scratch = CpuScratch;
    type Cache = CpuCache;
    type Step<'a> = &'a StepInputs;

    fn available_memory(&self) -> u64 {
        memory::available()
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        assert_eq!(self.memory().peak, 0, "memory is reserved after the first allocation; this is a bug");
        self.arena = arena(PAGE)?; // first gives back what is not wanted any more
        self.arena = arena(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        Ok(())
    }

    fn memory(&self) -> MemoryUse {
        let stats = self.arena.bfc().stats();
        MemoryUse { in_use: stats.in_use as u64, peak: stats.peak as u64 }
    }

    fn matrix_bytes(&self, rows: usize, columns: usize, dtype: Dtype) -> u64 {
        self.granted(MatrixLayout { rows, columns, dtype }.bytes())
    }

    fn buffer_bytes(&self, len: usize) -> u64 {
        self.granted(len.saturating_mul(size_of::<f32>()))
    }

    fn scratch_bytes(&self, spec: &StepSpec) -> u64 {
        let (attention, sampling) = self.scratch_lens(spec);
        self.buffer_bytes(attention).saturating_add(self.buffer_bytes(sampling))
    }

    fn block_bytes(&self, spec: &CacheSpec) -> u64 {
        CacheShape::new(spec).block_bytes() as u64
    }

    fn cache_bytes(&self, spec: &CacheSpec, blocks: usize) -> u64 {
        match blocks {
            0 => 0,
            blocks => self.granted(CacheShape::new(spec).block_bytes().saturating_mul(blocks)),
        }
    }

    fn load_matrix(&mut self, source: &dyn RowSource, dtype: Dtype) -> Result<CpuMatrix, DeviceError> {
        let layout = MatrixLayout { rows: source.rows(), columns: source.columns(), dtype };
        let region = self.region(layout.bytes(), 1, Placement::Low, "weights")?;
        let [bytes] = lend(&mut self.arena, [&region]);
        layout.pack(&self.pool, bytes, |rows, out| source.read(rows, out));
        Ok(CpuMatrix { layout, region })
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CpuBuffer, DeviceError> {
        let region = self.region(values.len(), size_of::<f32>(), Placement::Low, "weights")?;
        let [bytes] = lend(&mut self.arena, [&region]);
        cast_slice_mut(bytes).copy_from_slice(values);
        Ok(CpuBuffer(region))
    }

    fn allocate(&mut self, len: usize) -> Result<CpuBuffer, DeviceError> {
        self.region(len, size_of::<f32>(), Placement::High, "workspace").map(CpuBuffer)
    }

    fn allocate_scratch(&mut self, spec: &StepSpec) -> Result<CpuScratch, DeviceError> {
        let (attention, sampling) = self.scratch_lens(spec);
        Ok(CpuScratch {
            attention: self.region(attention, size_of::<f32>(), Placement::High, "attention scratch")?,
            sampling: self.region(sampling, size_of::<f32>(), Placement::High, "sampling scratch")?,
        })
    }

    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<CpuCache, DeviceError> {
        let shape = CacheShape::new(spec);
        let mut blocks = |count, name| self.region(count, shape.block_bytes(), Placement::Low, name);
        let cache = blocks(spec.blocks, "KV cache")?;
        let host_blocks =
            (spec.host_blocks > 0).then(|| blocks(spec.host_blocks, "host cache")).transpose()?;
        Ok(CpuCache { layout: kv_layout(spec), blocks: cache, host_blocks, shape })
    }

    fn copy_blocks(
        &mut self,
        cache: &mut CpuCache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        let host = cache.host_blocks.as_ref().expect("copies without a host tier; this is a bug");
        let [blocks, host] = lend(&mut self.arena, [&cache.blocks, host]);
        copies.for_each(|copy| cache.shape.copy(blocks, host, copy));
        Ok(())
    }

    fn upload<'a>(&mut self, inputs: &'a StepInputs) -> Result<&'a StepInputs, DeviceError> {
        Ok(inputs)
    }

    fn embed(
        &mut self,
        step: &StepInputs,
        table: &CpuMatrix,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [bytes, out] = lend(&mut self.arena, [&table.region, &out.0]);
        let table = Matrix { layout: table.layout, bytes };
        for (token, row) in step.tokens.iter().zip(cast_slice_mut(out).chunks_exact_mut(table.layout.columns))
        {
            table.read_row(*token as usize, row);
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &CpuBuffer,
        weight: &CpuBuffer,
        epsilon: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [x, weight, out] = lend(&mut self.arena, [&x.0, &weight.0, &out.0]);
        let weight: &[f32] = cast_slice(weight);
        let width = weight.len();
        let x = Rows::dense(&cast_slice(x)[..rows * width], width);
        let out = RowsMut::dense(&mut cast_slice_mut(out)[..rows * width], width);
        self.kernels.rms_norm(&self.pool, x, weight, epsilon, out);
        Ok(())
    }

    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &CpuBuffer,
        weight: &CpuMatrix,
        epilogue: Epilogue<&CpuBuffer>,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let MatrixLayout { rows: features, columns, .. } = weight.layout;
        let (x, bytes, bias, out) = match epilogue.bias() {
            None => {
                let [x, bytes, out] = lend(&mut self.arena, [&x.0, &weight.region, &out.0]);
                (x, bytes, &[][..], out)
            }
            Some(bias) => {
                let [x, bytes, bias, out] = lend(&mut self.arena, [&x.0, &weight.region, &bias.0, &out.0]);
                (x, bytes, &*bias, out)
            }
        };
        let x = &cast_slice(x)[rows.start * columns..rows.end * columns];
        let out = &mut cast_slice_mut(out)[..rows.len() * features];
        let epilogue = epilogue.map(|_| cast_slice(bias));
        self.kernels.matmul(
            &self.pool,
            x,
            rows.len(),
            Matrix { layout: weight.layout, bytes },
            epilogue,
            out,
        );
        Ok(())
    }

    fn rope_write_kv(
        &mut self,
        step: &StepInputs,
        shape: HeadShape,
        norms: Option<(&CpuBuffer, &CpuBuffer, f32)>,
        qkv: &mut CpuBuffer,
        layer: usize,
        cache: &mut CpuCache,
    ) -> Result<(), DeviceError> {
        let Self { kernels, pool, arena } = self;
        let (stride, angles) = (shape.qkv_width(), shape.head_dim / 2);
        let values = step.tokens.len() * stride;
        let [query, key, value] = parts(shape);
        if let Some((query_norm, key_norm, epsilon)) = norms {
            for (columns, weight) in [(query.clone(), query_norm), (key.clone(), key_norm)] {
                let [weight, qkv] = lend(arena, [&weight.0, &qkv.0]);
                let heads = RowsMut::columns(&mut cast_slice_mut(qkv)[..values], stride, columns);
                kernels.rms_norm_in_place(pool, heads, cast_slice(weight), epsilon);
            }
        }
        let [qkv, blocks] = lend(arena, [&qkv.0, &cache.blocks]);
        let qkv = &mut cast_slice_mut(qkv)[..values];
        let (cosines, sines) = (Rows::dense(&step.cosines, angles), Rows::dense(&step.sines, angles));
        let rotated = RowsMut::columns(qkv, stride, query.start..key.end);
        kernels.rope(pool, rotated, shape.head_dim, cosines, sines);
        let blocks = cache.shape.layer_mut(blocks, layer);
        let places = step.write_blocks.iter().zip(&step.write_offsets);
        for (row, (block, offset)) in qkv.chunks_exact(stride).zip(places) {
            let (key, value) = (&row[key.clone()], &row[value.clone()]);
            kernels.write_kv(&cache.layout, blocks, *block, *offset as usize, key, value);
        }
        Ok(())
    }

    fn attention(
        &mut self,
        step: &StepInputs,
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &CpuCache,
        qkv: &CpuBuffer,
        scratch: &mut CpuScratch,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let Self { kernels, pool, arena } = self;
        let (tokens, stride, width) = (step.tokens.len(), shape.qkv_width(), shape.query_width());
        let [blocks, qkv, partials, out] = lend(arena, [&cache.blocks, &qkv.0, &scratch.attention, &out.0]);
        kernels.attention(
            pool,
            &cache.layout,
            cache.shape.layer(blocks, layer),
            &step.sequences,
            &step.blocks,
            Rows::columns(&cast_slice(qkv)[..tokens * stride], stride, 0..width),
            shape.heads,
            params,
            cast_slice_mut(partials),
            RowsMut::dense(&mut cast_slice_mut(out)[..tokens * width], width),
        );
        Ok(())
    }

    fn silu_mul(
        &mut self,
        rows: usize,
        width: usize,
        gate_up: &CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [gate_up, out] = lend(&mut self.arena, [&gate_up.0, &out.0]);
        let gate_up = Rows::dense(&cast_slice(gate_up)[..rows * 2 * width], 2 * width);
        let out = RowsMut::dense(&mut cast_slice_mut(out)[..rows * width], width);
        self.kernels.silu_mul(&self.pool, gate_up, out);
        Ok(())
    }

    fn gather(
        &mut self,
        step: &StepInputs,
        width: usize,
        x: &CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [x, out] = lend(&mut self.arena, [&x.0, &out.0]);
        let (x, out): (&[f32], &mut [f32]) = (cast_slice(x), cast_slice_mut(out));
        for (row, out) in step.output_rows.iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&x[*row as usize * width..][..width]);
        }
        Ok(())
    }

    fn sample<'a>(
        &mut self,
        vocabulary: usize,
        logits: &CpuBuffer,
        params: &(dyn Fn(usize) -> SampleParams<'a> + Sync),
        scratch: &mut CpuScratch,
        out: &mut [Sampled],
    ) -> Result<(), DeviceError> {
        let Self { kernels, pool, arena } = self;
        let [logits, floats] = lend(arena, [&logits.0, &scratch.sampling]);
        let (num_places, logits) = (out.len(), cast_slice::<u8, f32>(logits));
        let desks = cast_slice_mut::<u8, f32>(floats).chunks_exact_mut(sampling::Scratch::len(vocabulary));
        let desks = Mutex::new(desks);
        // Each place goes to one worker; which one shows nowhere.
        let places_left = Mutex::new(out.iter_mut().enumerate());
        let share = |_| {
            let floats = next(&desks).expect("there is one for each worker; this is a bug");
            let mut scratch = sampling::Scratch::new(floats, vocabulary);
            while let Some((place, out)) = next(&places_left) {
                let params = params(place);
                let logits = &logits[params.row as usize * vocabulary..][..vocabulary];
                sampling::sample_row(*kernels, logits, &params, &mut scratch, out);
            }
        };
        if num_places > 1 {
            pool.share(&share)
        } else {
            share(0)
        }
        Ok(())
    }

    fn download(&mut self, x: &CpuBuffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let x = self.arena.bytes(&x.0).expect(FOREIGN);
        out.copy_from_slice(&cast_slice(x)[start..][..out.len()]);
        Ok(())
    }
}
