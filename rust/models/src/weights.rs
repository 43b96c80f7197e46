//! Loads the weights of a decoder from a checkpoint. The tables `FUSED_*` list the tensors that are fused into one
//! matrix; the backend packs the matrices.

use std::ops::{ControlFlow, Range};

use penstock_checkpoint::{Checkpoint, Tensor};
use penstock_device::{Backend, MatrixPart, RowSource, WeightSource};
use penstock_types::{Activations, Dtype, GridRows, WeightFormat};

use crate::config::ModelConfig;
use crate::decoder::{Decoder, Layer, Linear};
use crate::error::ModelError;
use crate::formats::WeightFormats;

/// Query, key and value have the same input, so they are one product.
const FUSED_QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
/// The modules that have a matrix of their own.
const OUTPUT: &str = "self_attn.o_proj";
const DOWN: &str = "mlp.down_proj";
/// Gate and up have the same input.
const FUSED_GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];

/// The embedding table, and the head if it is another matrix.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// Called with the loaded and the total bytes of packed weights; `Break` cancels the load.
pub type ProgressCallback<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Loads every weight of `config` from `checkpoint` onto `backend`, matrices in `formats`.
///
/// The shape of a tensor is checked against the configuration before it is read.
pub fn load<B: Backend>(
    backend: &mut B,
    checkpoint: &Checkpoint,
    config: ModelConfig,
    formats: &WeightFormats,
    progress: ProgressCallback<'_>,
) -> Result<Decoder<B>, ModelError> {
    let total = weight_bytes(backend, &config, formats);
    let mut loader = Loader { backend, checkpoint, formats, progress, done: 0, total };
    loader.advance(0)?;
    let hidden = config.hidden_size;
    let embedding = loader.matrix(&[EMBEDDING.to_owned()], &[config.vocabulary_size], hidden)?;
    let layers =
        (0..config.num_layers()).map(|layer| loader.layer(&config, layer)).collect::<Result<_, _>>()?;
    let norm = loader.vector("model.norm.weight", hidden)?;
    let head = if config.tied_head {
        None
    } else {
        Some(loader.matrix(&[HEAD.to_owned()], &[config.vocabulary_size], hidden)?)
    };
    Ok(Decoder::new(config, embedding, layers, norm, head))
}

/// The bytes of all weights on the device.
pub fn weight_bytes<B: Backend>(backend: &B, config: &ModelConfig, formats: &WeightFormats) -> u64 {
    let (heads, hidden) = (config.heads, config.hidden_size);
    let matrix = |fused: Fused| {
        let Fused { rows, columns, .. } = &fused;
        let runs = runs(backend, &fused.names, rows, *columns, formats);
        let sizes: Vec<_> =
            runs.iter().map(|run| (rows[run.parts.clone()].iter().sum(), run.format)).collect();
        backend.matrix_bytes(*columns, &sizes)
    };
    let matrices: u64 = fused_matrices(config).map(matrix).sum();
    let bias = |has_bias: bool, len: usize| if has_bias { backend.buffer_bytes(len) } else { 0 };
    let norm = backend.buffer_bytes(hidden);
    let layer = bias(config.qkv_bias, heads.qkv_width())
        + bias(config.output_bias, hidden)
        + bias(config.mlp_bias, 2 * config.intermediate_size)
        + bias(config.mlp_bias, hidden)
        + 2 * norm
        + if config.qk_norm { 2 * backend.buffer_bytes(heads.head_dim) } else { 0 };
    matrices + norm + layer * config.num_layers() as u64
}

/// The matrices of one module of all layers that have the same format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFormat {
    /// The name of the module, in a layer without the name of the layer.
    pub module: String,
    pub format: WeightFormat,
    pub count: usize,
    /// The bytes of all of them, without padding.
    pub bytes: u64,
}

/// The formats of the weight matrices, in the order of the modules.
pub fn module_formats<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    formats: &WeightFormats,
) -> Vec<ModuleFormat> {
    let mut found: Vec<ModuleFormat> = Vec::new();
    for Fused { names, rows, columns } in fused_matrices(config) {
        for Run { parts, format } in runs(backend, &names, &rows, columns, formats) {
            for part in parts {
                let module = module_of_layer(module_name(&names[part]));
                let bytes = format.bytes(rows[part], columns) as u64;
                match found.iter_mut().find(|other| other.module == module && other.format == format) {
                    Some(other) => (other.count, other.bytes) = (other.count + 1, other.bytes + bytes),
                    None => found.push(ModuleFormat { module: module.to_owned(), format, count: 1, bytes }),
                }
            }
        }
    }
    let first: Vec<String> = found.iter().map(|found| found.module.clone()).collect();
    found.sort_by_key(|found| first.iter().position(|module| *module == found.module));
    found
}

/// The tensors that are fused into one matrix, with the rows of each.
struct Fused {
    names: Vec<String>,
    rows: Vec<usize>,
    columns: usize,
}

/// The matrices of a model, in the order in which they are loaded.
fn fused_matrices(config: &ModelConfig) -> impl Iterator<Item = Fused> {
    let (hidden, vocabulary, heads) = (config.hidden_size, config.vocabulary_size, config.heads);
    let (query, kv, wide) = (heads.query_width(), heads.kv_width(), config.intermediate_size);
    let table =
        move |name: &str| Fused { names: vec![name.to_owned()], rows: vec![vocabulary], columns: hidden };
    let layer = move |layer: usize| {
        let fused = |parts: &[&str], rows: &[usize], columns: usize| Fused {
            names: tensor_names(layer, parts, "weight"),
            rows: rows.to_vec(),
            columns,
        };
        [
            fused(&FUSED_QKV, &[query, kv, kv], hidden),
            fused(&[OUTPUT], &[hidden], query),
            fused(&FUSED_GATE_UP, &[wide, wide], hidden),
            fused(&[DOWN], &[hidden], wide),
        ]
    };
    let head = (!config.tied_head).then(|| table(HEAD));
    [table(EMBEDDING)].into_iter().chain((0..config.num_layers()).flat_map(layer)).chain(head)
}

/// The names of all weight matrices, in the order in which they are loaded.
pub(crate) fn matrix_names(config: &ModelConfig) -> impl Iterator<Item = String> {
    fused_matrices(config).flat_map(|fused| fused.names)
}

/// The name of the module of a weight matrix.
pub(crate) fn module_name(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// The name of a module without the name of its layer.
fn module_of_layer(name: &str) -> &str {
    name.strip_prefix("model.layers.").and_then(|name| Some(name.split_once('.')?.1)).unwrap_or(name)
}

/// The names of a kind of tensor of some modules of a layer.
fn tensor_names(layer: usize, parts: &[&str], kind: &str) -> Vec<String> {
    parts.iter().map(|part| format!("model.layers.{layer}.{part}.{kind}")).collect()
}

/// Consecutive tensors of a fused matrix that have the same format.
struct Run {
    parts: Range<usize>,
    format: WeightFormat,
}

/// Divides the tensors of a fused matrix. If some read codes and some read floats, or the backend has no such codes, all
/// read floats.
fn runs<B: Backend>(
    backend: &B,
    names: &[String],
    rows: &[usize],
    columns: usize,
    formats: &WeightFormats,
) -> Vec<Run> {
    let mut all: Vec<WeightFormat> = names.iter().map(|name| formats.of(name)).collect();
    if !all.iter().all(|format| format.reads_codes() && backend.supports(*format, columns)) {
        all.iter_mut().for_each(|format| *format = format.with_activations(Activations::Float));
    }
    let mut runs: Vec<Run> = Vec::new();
    for (index, format) in all.into_iter().enumerate().take(rows.len()) {
        match runs.last_mut() {
            Some(run) if run.format == format => run.parts.end = index + 1,
            _ => runs.push(Run { parts: index..index + 1, format }),
        }
    }
    runs
}

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    checkpoint: &'a Checkpoint,
    formats: &'a WeightFormats,
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
            output: self.linear(layer, &[OUTPUT], &[hidden], query, config.output_bias)?,
            mlp_norm: self.vector(&name("post_attention_layernorm"), hidden)?,
            gate_up: self.linear(layer, &FUSED_GATE_UP, &[wide, wide], hidden, config.mlp_bias)?,
            down: self.linear(layer, &[DOWN], &[hidden], wide, config.mlp_bias)?,
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
        let weight = self.matrix(&tensor_names(layer, parts, "weight"), rows, columns)?;
        let bias = if bias { Some(self.bias(&tensor_names(layer, parts, "bias"), rows)?) } else { None };
        Ok(Linear { weight, bias })
    }

    fn matrix(&mut self, names: &[String], rows: &[usize], columns: usize) -> Result<B::Matrix, ModelError> {
        let tensors = names
            .iter()
            .zip(rows)
            .map(|(name, rows)| self.tensor(name, &[*rows, columns]))
            .collect::<Result<Vec<_>, _>>()?;
        let runs = runs(&*self.backend, names, rows, columns, self.formats);
        let stacked: Vec<Stacked<'_>> = runs
            .iter()
            .map(|Run { parts, .. }| Stacked {
                tensors: tensors[parts.clone()].to_vec(),
                rows: rows[parts.clone()].to_vec(),
                columns,
            })
            .collect();
        let parts: Vec<MatrixPart<'_>> = stacked
            .iter()
            .zip(&runs)
            .map(|(source, Run { format, .. })| MatrixPart { source, format: *format })
            .collect();
        let sizes: Vec<_> = parts.iter().map(|part| (part.source.rows(), part.format)).collect();
        let matrix = self.backend.load_matrix(&parts)?;
        self.advance(self.backend.matrix_bytes(columns, &sizes))?;
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
        let mut out = out;
        for (tensor, rows) in self.inside(rows) {
            let (part, rest) = out.split_at_mut(rows.len() * self.columns);
            tensor.read_rows(rows, part);
            out = rest;
        }
    }
}

impl WeightSource for Stacked<'_> {
    fn format(&self) -> WeightFormat {
        let mut formats = self.tensors.iter().map(Tensor::format);
        let first = formats.next().expect("a tensor");
        // Tensors that are not all stored alike are read as floats.
        if formats.all(|format| format == first) { first } else { WeightFormat::Float(Dtype::F32) }
    }

    fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        let mut parts = self.inside(rows);
        if let Some((tensor, rows)) = parts.next() {
            tensor.read_grid(rows, out);
        }
        for (tensor, rows) in parts {
            let mut part = GridRows::default();
            tensor.read_grid(rows, &mut part);
            out.append(part);
        }
    }
}

impl<'a> Stacked<'a> {
    /// The tensors that have some of these rows, each with its own row numbers.
    fn inside(&self, rows: Range<usize>) -> impl Iterator<Item = (&Tensor<'a>, Range<usize>)> {
        let mut first = 0;
        self.tensors.iter().zip(&self.rows).filter_map(move |(tensor, count)| {
            let start = first;
            first += count;
            let inside = rows.start.max(start)..rows.end.min(start + count);
            (inside.start < inside.end).then(|| (tensor, inside.start - start..inside.end - start))
        })
    }
}
