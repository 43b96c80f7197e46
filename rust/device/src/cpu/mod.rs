//! The CPU backend: weights as packed panels, activations as plain float32, every operation a call into
//! `penstock-kernels` on one worker pool. Only sampling has arithmetic of its own (`sampling.rs`).

mod memory;
mod philox;
mod sampling;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use memmap2::MmapMut;
use penstock_kernels as kernels;
use penstock_kernels::{
    AttentionScratch, Element, IsaError, Kernels, KvLayout, Matrix, MatrixLayout, Pool, Rows, RowsMut,
};

use crate::backend::{
    AttentionParams, Backend, CacheSpec, DeviceError, Epilogue, HeadShape, RowSource, SampleParams, Sampled,
    StepInputs,
};

/// Positions for which splits of a long sequence's attention can be computed apart.
const MOST_SCRATCH_POSITIONS: usize = 1 << 20;

/// The CPU.
pub struct Cpu {
    kernels: Kernels,
    pool: Pool,
    scratch: AttentionScratch,
    /// One for each worker that samples.
    sampling: Vec<Mutex<sampling::Scratch>>,
    /// Where workers leave what they sampled, one place per row.
    sampled: Vec<Mutex<Sampled>>,
}

/// A weight in panels.
pub struct CpuMatrix {
    layout: MatrixLayout,
    bytes: MmapMut,
}

/// The KV cache: one region per layer.
pub struct CpuCache {
    layout: KvLayout,
    layers: Vec<MmapMut>,
}

impl Cpu {
    /// A backend on `threads` threads, the one that calls it included, with the instruction set that `PENSTOCK_ISA` names or
    /// else the best there is.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        let pool = Pool::new(threads).map_err(|error| DeviceError::Start(error.to_string()))?;
        let sampling = (0..threads).map(|_| Mutex::default()).collect();
        Ok(Self {
            kernels: Kernels::from_environment()?,
            pool,
            scratch: AttentionScratch::default(),
            sampling,
            sampled: Vec::new(),
        })
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Instruction set, as `PENSTOCK_ISA` spells it.
    pub fn isa(&self) -> &'static str {
        self.kernels.isa().name()
    }
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

impl CpuMatrix {
    fn as_matrix(&self) -> Matrix<'_> {
        Matrix { layout: self.layout, bytes: &self.bytes }
    }
}

fn kv_layout(spec: &CacheSpec) -> KvLayout {
    let &CacheSpec { block_size, heads: HeadShape { kv_heads, head_dim, .. }, element, .. } = spec;
    KvLayout { block_size, kv_heads, head_dim, element }
}

/// Columns of the query, key and value part of a row.
fn parts(shape: HeadShape) -> [Range<usize>; 3] {
    let (query, kv) = (shape.query_width(), shape.kv_width());
    [0..query, query..query + kv, query + kv..query + 2 * kv]
}

impl Backend for Cpu {
    type Matrix = CpuMatrix;
    type Vector = Vec<f32>;
    type Buffer = Vec<f32>;
    type Cache = CpuCache;
    type Step<'a> = &'a StepInputs;

    fn load_matrix(&mut self, source: &dyn RowSource, element: Element) -> Result<CpuMatrix, DeviceError> {
        let layout = MatrixLayout { rows: source.rows(), columns: source.columns(), element };
        let mut bytes = memory::zeroed("a weight matrix", layout.bytes())?;
        layout.pack(&self.pool, &mut bytes[..layout.bytes()], |rows, out| source.read(rows, out));
        Ok(CpuMatrix { layout, bytes })
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<Vec<f32>, DeviceError> {
        Ok(values.to_vec())
    }

    fn available_memory(&self) -> u64 {
        memory::available()
    }

    fn matrix_bytes(&self, rows: usize, columns: usize, element: Element) -> u64 {
        MatrixLayout { rows, columns, element }.bytes() as u64
    }

    fn allocate(&mut self, len: usize) -> Result<Vec<f32>, DeviceError> {
        Ok(vec![0.0; len])
    }

    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<CpuCache, DeviceError> {
        let layout = kv_layout(spec);
        let bytes = layout.block_bytes().saturating_mul(spec.blocks);
        let layers =
            (0..spec.layers).map(|_| memory::zeroed("the KV cache", bytes)).collect::<Result<_, _>>()?;
        let positions = spec.blocks.saturating_mul(spec.block_size).min(MOST_SCRATCH_POSITIONS);
        self.scratch = AttentionScratch::new(spec.heads.heads, spec.heads.head_dim, positions);
        Ok(CpuCache { layout, layers })
    }

    fn block_bytes(&self, spec: &CacheSpec) -> u64 {
        kv_layout(spec).block_bytes() as u64
    }

    fn upload<'a>(&mut self, inputs: &'a StepInputs) -> Result<&'a StepInputs, DeviceError> {
        Ok(inputs)
    }

    fn embed(&mut self, step: &StepInputs, table: &CpuMatrix, out: &mut Vec<f32>) -> Result<(), DeviceError> {
        let table = table.as_matrix();
        for (token, row) in step.tokens.iter().zip(out.chunks_exact_mut(table.layout.columns)) {
            table.read_row(*token as usize, row);
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        epsilon: f32,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let width = weight.len();
        let (x, out) =
            (Rows::dense(&x[..rows * width], width), RowsMut::dense(&mut out[..rows * width], width));
        self.kernels.rms_norm(&self.pool, x, weight, epsilon, out);
        Ok(())
    }

    fn linear(
        &mut self,
        rows: usize,
        x: &Vec<f32>,
        weight: &CpuMatrix,
        epilogue: Epilogue<'_, Vec<f32>>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let MatrixLayout { rows: features, columns, .. } = weight.layout;
        let (x, out) = (&x[..rows * columns], &mut out[..rows * features]);
        let (fused, bias) = match epilogue {
            Epilogue::Store => (kernels::Epilogue::Store, None),
            Epilogue::Bias(bias) => (kernels::Epilogue::Bias(bias), None),
            Epilogue::Add => (kernels::Epilogue::Add, None),
            Epilogue::AddBias(bias) => (kernels::Epilogue::Add, Some(bias)),
        };
        self.kernels.matmul(&self.pool, x, rows, weight.as_matrix(), fused, out);
        if let Some(bias) = bias {
            out.chunks_exact_mut(features).for_each(|row| self.kernels.add(row, bias));
        }
        Ok(())
    }

    fn rope_write_kv(
        &mut self,
        step: &StepInputs,
        shape: HeadShape,
        norms: Option<(&Vec<f32>, &Vec<f32>, f32)>,
        qkv: &mut Vec<f32>,
        layer: usize,
        cache: &mut CpuCache,
    ) -> Result<(), DeviceError> {
        let (stride, angles) = (shape.qkv_width(), shape.head_dim / 2);
        let qkv = &mut qkv[..step.tokens.len() * stride];
        let [query, key, value] = parts(shape);
        if let Some((query_norm, key_norm, epsilon)) = norms {
            for (columns, weight) in [(query.clone(), query_norm), (key.clone(), key_norm)] {
                self.kernels.rms_norm_in_place(
                    &self.pool,
                    RowsMut::columns(qkv, stride, columns),
                    weight,
                    epsilon,
                );
            }
        }
        let (cosines, sines) = (Rows::dense(&step.cosines, angles), Rows::dense(&step.sines, angles));
        let rotated = RowsMut::columns(qkv, stride, query.start..key.end);
        self.kernels.rope(&self.pool, rotated, shape.head_dim, cosines, sines);
        let places = step.write_blocks.iter().zip(&step.write_offsets);
        for (row, (block, offset)) in qkv.chunks_exact(stride).zip(places) {
            let (key, value) = (&row[key.clone()], &row[value.clone()]);
            self.kernels.write_kv(
                &cache.layout,
                &mut cache.layers[layer],
                *block,
                *offset as usize,
                key,
                value,
            );
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
        qkv: &Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let (tokens, stride, width) = (step.tokens.len(), shape.qkv_width(), shape.query_width());
        let query = Rows::columns(&qkv[..tokens * stride], stride, 0..width);
        let params = kernels::AttentionParams { scale: params.scale, window: params.window, softcap: None };
        let (layout, bytes, out) =
            (&cache.layout, &cache.layers[layer], RowsMut::dense(&mut out[..tokens * width], width));
        let Self { kernels, pool, scratch, .. } = self;
        kernels.attention(
            pool,
            layout,
            bytes,
            &step.sequences,
            &step.blocks,
            query,
            shape.heads,
            params,
            scratch,
            out,
        );
        Ok(())
    }

    fn silu_mul(
        &mut self,
        rows: usize,
        width: usize,
        gate_up: &Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let gate_up = Rows::dense(&gate_up[..rows * 2 * width], 2 * width);
        self.kernels.silu_mul(&self.pool, gate_up, RowsMut::dense(&mut out[..rows * width], width));
        Ok(())
    }

    fn gather(
        &mut self,
        step: &StepInputs,
        width: usize,
        x: &Vec<f32>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        for (row, out) in step.output_rows.iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&x[*row as usize * width..][..width]);
        }
        Ok(())
    }

    fn sample<'a>(
        &mut self,
        vocabulary: usize,
        logits: &Vec<f32>,
        params: &(dyn Fn(usize) -> SampleParams<'a> + Sync),
        out: &mut [Sampled],
    ) -> Result<(), DeviceError> {
        let Self { kernels, pool, sampling, sampled, .. } = self;
        sampled.resize_with(out.len().max(sampled.len()), Mutex::default);
        let (rows, next_row) = (out.len(), AtomicUsize::new(0));
        let share = |worker: usize| {
            let mut scratch = sampling[worker].lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                let row = next_row.fetch_add(1, Ordering::Relaxed); // each row to one worker; nothing else depends on it
                if row >= rows {
                    return;
                }
                let logits = &logits[row * vocabulary..][..vocabulary];
                let token = sampling::sample_row(*kernels, logits, &params(row), &mut scratch);
                *sampled[row].lock().unwrap_or_else(PoisonError::into_inner) = token;
            }
        };
        if rows > 1 {
            pool.share(&share)
        } else {
            share(0)
        }
        for (out, sampled) in out.iter_mut().zip(sampled) {
            *out = *sampled.get_mut().unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    fn download(&mut self, x: &Vec<f32>, out: &mut [f32]) -> Result<(), DeviceError> {
        out.copy_from_slice(&x[..out.len()]);
        Ok(())
    }
}
