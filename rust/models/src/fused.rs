//! The fused matrices and vectors of a decoder, and their tensors.

use std::ops::Range;

use penstock_checkpoint::Tensor;
use penstock_device::{Backend, PlannedMatrix, RowSource, WeightSource};
use penstock_types::{Activations, Dtype, GridRows, WeightFormat};

use crate::config::ModelConfig;
use crate::formats::{Residence, WeightFormats};

/// Query, key and value have the same input, so they are one product.
pub(crate) const FUSED_QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
/// Modules with a separate matrix.
pub(crate) const OUTPUT: &str = "self_attn.o_proj";
pub(crate) const DOWN: &str = "mlp.down_proj";
/// Gate and up have the same input.
pub(crate) const FUSED_GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];

/// The embedding table, and the head if it is a separate matrix.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const NORM: &str = "model.norm.weight";

/// Tensors concatenated by rows.
pub(crate) struct Fused {
    pub(crate) names: Vec<String>,
    /// Rows of each tensor.
    pub(crate) rows: Vec<usize>,
    /// `None` for vectors.
    pub(crate) columns: Option<usize>,
}

impl Fused {
    pub(crate) fn len(&self) -> usize {
        self.rows.iter().sum()
    }
}

/// The weights of a model, matrices first.
pub(crate) fn fused_weights(config: &ModelConfig) -> Vec<Fused> {
    let (hidden, heads, wide) = (config.hidden_size, config.heads, config.intermediate_size);
    let (query, kv) = (heads.query_width(), heads.kv_width());
    let one = |name: String, rows: usize, columns| Fused { names: vec![name], rows: vec![rows], columns };
    let mut matrices = vec![one(EMBEDDING.to_owned(), config.vocabulary_size, Some(hidden))];
    let mut vectors = vec![one(NORM.to_owned(), hidden, None)];
    for layer in 0..config.num_layers() {
        let mut linear = |parts: &[&str], rows: &[usize], columns: usize, bias: bool| {
            let fused = |kind, columns| Fused {
                names: tensor_names(layer, parts, kind),
                rows: rows.to_vec(),
                columns,
            };
            matrices.push(fused("weight", Some(columns)));
            if bias {
                vectors.push(fused("bias", None));
            }
        };
        linear(&FUSED_QKV, &[query, kv, kv], hidden, config.qkv_bias);
        linear(&[OUTPUT], &[hidden], query, config.output_bias);
        linear(&FUSED_GATE_UP, &[wide, wide], hidden, config.mlp_bias);
        linear(&[DOWN], &[hidden], wide, config.mlp_bias);
        let mut norm = |part: &str, len| vectors.push(one(weight_name(layer, part), len, None));
        norm("input_layernorm", hidden);
        norm("post_attention_layernorm", hidden);
        if config.qk_norm {
            norm("self_attn.q_norm", heads.head_dim);
            norm("self_attn.k_norm", heads.head_dim);
        }
    }
    if !config.tied_head {
        matrices.push(one(HEAD.to_owned(), config.vocabulary_size, Some(hidden)));
    }
    matrices.extend(vectors);
    matrices
}

/// The bytes of all weights, by the memory that holds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// Bytes in the arena of the device.
    pub arena: u64,
    /// Bytes of mapped files. A page takes memory when it is read.
    pub mapped: u64,
    /// Bytes that are in memory already.
    pub in_memory: u64,
}

impl WeightBytes {
    pub fn total(&self) -> u64 {
        self.arena.saturating_add(self.mapped).saturating_add(self.in_memory)
    }
}

/// The bytes of all weights.
pub fn weight_bytes<B: Backend>(backend: &B, config: &ModelConfig, formats: &WeightFormats) -> WeightBytes {
    let mut bytes = WeightBytes::default();
    for weight in fused_weights(config) {
        let Some(columns) = weight.columns else {
            bytes.arena += backend.buffer_bytes(weight.len());
            continue;
        };
        let parts = parts(&runs(backend, &weight, columns, formats), &weight.rows);
        let matrix = backend.matrix_bytes(columns, &parts);
        *match formats.residence() {
            Residence::Arena | Residence::Repacked => &mut bytes.arena,
            _ if backend.copies_mapped() => &mut bytes.arena,
            Residence::Mapped => &mut bytes.mapped,
            Residence::Memory => &mut bytes.in_memory,
        } += matrix;
    }
    bytes
}

/// The weight matrices, for the backend.
pub fn planned_matrices<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    formats: &WeightFormats,
) -> Vec<PlannedMatrix> {
    let matrices = fused_weights(config).into_iter();
    matrices
        .filter_map(|weight| {
            let columns = weight.columns?;
            let parts = parts(&runs(backend, &weight, columns, formats), &weight.rows);
            let is_multiplied = config.tied_head || weight.names != [EMBEDDING];
            Some(PlannedMatrix { columns, parts, is_multiplied })
        })
        .collect()
}

/// The matrices of one module of all layers that have the same format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFormat {
    /// The name of the module, in a layer without the name of the layer.
    pub module: String,
    pub format: WeightFormat,
    pub count: usize,
    /// The bytes of these matrices, without padding.
    pub bytes: u64,
}

/// The formats of the weight matrices, in the order of the modules.
pub fn module_formats<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    formats: &WeightFormats,
) -> Vec<ModuleFormat> {
    let mut found: Vec<ModuleFormat> = Vec::new();
    for fused in fused_weights(config) {
        let Some(columns) = fused.columns else { continue };
        for Run { parts, format } in runs(backend, &fused, columns, formats) {
            for part in parts {
                let module = module_of_layer(module_name(&fused.names[part]));
                let bytes = format.bytes(fused.rows[part], columns) as u64;
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

/// The names of all weight matrices.
pub(crate) fn matrix_names(config: &ModelConfig) -> impl Iterator<Item = String> {
    fused_weights(config).into_iter().filter(|fused| fused.columns.is_some()).flat_map(|fused| fused.names)
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
pub(crate) fn tensor_names(layer: usize, parts: &[&str], kind: &str) -> Vec<String> {
    parts.iter().map(|part| format!("model.layers.{layer}.{part}.{kind}")).collect()
}

pub(crate) fn weight_name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
}

/// Consecutive tensors of a fused matrix that have the same format.
pub(crate) struct Run {
    pub(crate) parts: Range<usize>,
    pub(crate) format: WeightFormat,
}

/// Divides the tensors of a fused matrix.
pub(crate) fn runs<B: Backend>(
    backend: &B,
    matrix: &Fused,
    columns: usize,
    formats: &WeightFormats,
) -> Vec<Run> {
    let all = matrix.names.iter().map(|name| formats.of(name)).collect();
    let mut runs: Vec<Run> = Vec::new();
    for (index, format) in readable_together(backend, columns, all).into_iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.format == format => run.parts.end = index + 1,
            _ => runs.push(Run { parts: index..index + 1, format }),
        }
    }
    runs
}

/// The formats of the tensors of a fused matrix. All read floats if they read different activations, or if the backend
/// does not support one of them.
pub(crate) fn readable_together<B: Backend>(
    backend: &B,
    columns: usize,
    mut formats: Vec<WeightFormat>,
) -> Vec<WeightFormat> {
    let activations = formats.first().map(|format| format.activations());
    let is_readable = |format: &WeightFormat| {
        Some(format.activations()) == activations && backend.supports(*format, columns)
    };
    if !formats.iter().all(is_readable) {
        formats.iter_mut().for_each(|format| *format = format.with_activations(Activations::Float));
    }
    formats
}

/// The rows and the format of each run.
pub(crate) fn parts(runs: &[Run], rows: &[usize]) -> Vec<(usize, WeightFormat)> {
    runs.iter().map(|run| (rows[run.parts.clone()].iter().sum(), run.format)).collect()
}

/// Tensors concatenated by rows.
pub(crate) struct Stacked<'a> {
    pub(crate) tensors: Vec<Tensor<'a>>,
    pub(crate) rows: Vec<usize>,
    pub(crate) columns: usize,
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
        // Tensors in different formats are read as floats.
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
    /// The tensors with some of these rows, and the row numbers in each tensor.
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

/// Some rows of another source.
pub(crate) struct Slice<'a> {
    pub(crate) source: &'a dyn WeightSource,
    pub(crate) rows: Range<usize>,
}

impl Slice<'_> {
    fn outer(&self, rows: Range<usize>) -> Range<usize> {
        self.rows.start + rows.start..self.rows.start + rows.end
    }
}

impl RowSource for Slice<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn columns(&self) -> usize {
        self.source.columns()
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        self.source.read(self.outer(rows), out);
    }
}

impl WeightSource for Slice<'_> {
    fn format(&self) -> WeightFormat {
        self.source.format()
    }

    fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        self.source.read_grid(self.outer(rows), out);
    }
}
