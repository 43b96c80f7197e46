//! Loads the weights of a decoder from a checkpoint. The tables `FUSED_*` list the tensors that are fused into one
//! matrix; the backend packs the matrices.

use std::ops::{ControlFlow, Range};

use penstock_checkpoint::{Checkpoint, Tensor};
use penstock_device::{Backend, RowSource};
use penstock_types::Dtype;

use crate::config::ModelConfig;
use crate::decoder::{Decoder, Layer, Linear};
use crate::error::ModelError;

/// Query, key and value have the same input, so they are one product.
const FUSED_QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
/// Gate and up have the same input.
const FUSED_GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];

/// Called with the loaded and the total bytes of packed weights; `Break` cancels the load.
pub type ProgressCallback<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Loads every weight of `config` from `checkpoint` onto `backend`, matrices in `dtype`.
///
/// The shape of a tensor is checked against the configuration before it is read.
pub fn load<B: Backend>(
    backend: &mut B,
    checkpoint: &Checkpoint,
    config: ModelConfig,
    dtype: Dtype,
    progress: ProgressCallback<'_>,
) -> Result<Decoder<B>, ModelError> {
    let total = weight_bytes(backend, &config, dtype);
    let mut loader = Loader { backend, checkpoint, dtype, progress, done: 0, total };
    loader.advance(0)?;
    let hidden = config.hidden_size;
    let embedding =
        loader.matrix(&["model.embed_tokens.weight".to_owned()], &[config.vocabulary_size], hidden)?;
    let layers =
        (0..config.num_layers()).map(|layer| loader.layer(&config, layer)).collect::<Result<_, _>>()?;
    let norm = loader.vector("model.norm.weight", hidden)?;
    let head = if config.tied_head {
        None
    } else {
        Some(loader.matrix(&["lm_head.weight".to_owned()], &[config.vocabulary_size], hidden)?)
    };
    Ok(Decoder::new(config, embedding, layers, norm, head))
}

/// The bytes of all weights on the device.
pub fn weight_bytes<B: Backend>(backend: &B, config: &ModelConfig, dtype: Dtype) -> u64 {
    let (hidden, heads, wide) = (config.hidden_size, config.heads, config.intermediate_size);
    let linear = |rows: usize, columns: usize, bias: bool| {
        backend.matrix_bytes(rows, columns, dtype) + if bias { backend.buffer_bytes(rows) } else { 0 }
    };
    let norm = backend.buffer_bytes(hidden);
    let layer = linear(heads.qkv_width(), hidden, config.qkv_bias)
        + linear(hidden, heads.query_width(), config.output_bias)
        + linear(2 * wide, hidden, config.mlp_bias)
        + linear(hidden, wide, config.mlp_bias)
        + 2 * norm
        + if config.qk_norm { 2 * backend.buffer_bytes(heads.head_dim) } else { 0 };
    let tables = if config.tied_head { 1 } else { 2 };
    layer * config.num_layers() as u64 + linear(config.vocabulary_size, hidden, false) * tables + norm
}

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    checkpoint: &'a Checkpoint,
    dtype: Dtype,
    progress: ProgressCallback<'a>,
    done: u64,
    total: u64,
}

impl<'a, B: Backend> Loader<'a, B> {
    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<Layer<B>, ModelError> {
        let (hidden, heads, wide) = (config.hidden_size, config.heads, config.intermediate_size);
        let (query, kv) = (heads.query_width(), heads.kv_width());
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let norms = config.qk_norm.then(|| [name("self_attn.q_norm"), name("self_attn.k_norm")]);
        Ok(Layer {
            attention_norm: self.vector(&name("input_layernorm"), hidden)?,
            qkv: self.linear(layer, &FUSED_QKV, &[query, kv, kv], hidden, config.qkv_bias)?,
            qk_norm: match norms {
                None => None,
                Some([q, k]) => Some((self.vector(&q, heads.head_dim)?, self.vector(&k, heads.head_dim)?)),
            },
            output: self.linear(layer, &["self_attn.o_proj"], &[hidden], query, config.output_bias)?,
            mlp_norm: self.vector(&name("post_attention_layernorm"), hidden)?,
            gate_up: self.linear(layer, &FUSED_GATE_UP, &[wide, wide], hidden, config.mlp_bias)?,
            down: self.linear(layer, &["mlp.down_proj"], &[hidden], wide, config.mlp_bias)?,
            window: config.windows[layer],
        })
    }

    /// The modules `parts` of a layer fused into one, with `rows[i]` output features each.
    fn linear(
        &mut self,
        layer: usize,
        parts: &[&str],
        rows: &[usize],
        columns: usize,
        bias: bool,
    ) -> Result<Linear<B>, ModelError> {
        let names = |kind: &str| -> Vec<String> {
            parts.iter().map(|part| format!("model.layers.{layer}.{part}.{kind}")).collect()
        };
        let weight = self.matrix(&names("weight"), rows, columns)?;
        let bias = if bias { Some(self.bias(&names("bias"), rows)?) } else { None };
        Ok(Linear { weight, bias })
    }

    fn matrix(&mut self, names: &[String], rows: &[usize], columns: usize) -> Result<B::Matrix, ModelError> {
        let tensors = names
            .iter()
            .zip(rows)
            .map(|(name, rows)| self.tensor(name, &[*rows, columns]))
            .collect::<Result<Vec<_>, _>>()?;
        let stacked = Stacked { tensors, rows: rows.to_vec(), columns };
        let matrix = self.backend.load_matrix(&stacked, self.dtype)?;
        self.advance(self.backend.matrix_bytes(stacked.rows(), columns, self.dtype))?;
        Ok(matrix)
    }

    fn bias(&mut self, names: &[String], rows: &[usize]) -> Result<B::Vector, ModelError> {
        let mut values = Vec::with_capacity(rows.iter().sum());
        for (name, rows) in names.iter().zip(rows) {
            let tensor = self.tensor(name, &[*rows])?;
            let start = values.len();
            values.resize(start + rows, 0.0);
            tensor.read_rows(0..1, &mut values[start..]);
        }
        let vector = self.backend.load_vector(&values)?;
        self.advance(self.backend.buffer_bytes(values.len()))?;
        Ok(vector)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<B::Vector, ModelError> {
        self.bias(&[name.to_owned()], &[len])
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.checkpoint.tensor(name)?;
        if tensor.shape() != shape {
            let found = tensor.shape().to_vec();
            return Err(ModelError::Shape { tensor: name.to_owned(), found, expected: shape.to_vec() });
        }
        Ok(tensor)
    }

    fn advance(&mut self, bytes: u64) -> Result<(), ModelError> {
        self.done += bytes;
        match (self.progress)(self.done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ModelError::Cancelled),
        }
    }
}

/// Tensors concatenated by rows.
struct Stacked<'a> {
    tensors: Vec<Tensor<'a>>,
    rows: Vec<usize>,
    columns: usize,
}

impl RowSource for Stacked<'_> {
    fn rows(&self) -> usize {
        self.rows.iter().sum()
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        // `rows` may span several tensors.
        let (mut first, mut out) = (0, out);
        for (tensor, count) in self.tensors.iter().zip(&self.rows) {
            let inside = rows.start.max(first)..rows.end.min(first + count);
            if inside.start < inside.end {
                let (part, rest) = out.split_at_mut(inside.len() * self.columns);
                tensor.read_rows(inside.start - first..inside.end - first, part);
                out = rest;
            }
            first += count;
        }
    }
}
