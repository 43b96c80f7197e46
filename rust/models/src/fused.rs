//! The fused matrices and vectors of a decoder, and their tensors.

use std::ops::Range;

use penstock_checkpoint::Tensor;
use penstock_device::{RowSource, WeightSource};
use penstock_types::{Dtype, GridRows, WeightFormat};

use crate::config::ModelConfig;

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

/// The names of all weight matrices.
pub(crate) fn matrix_names(config: &ModelConfig) -> impl Iterator<Item = String> {
    fused_weights(config).into_iter().filter(|fused| fused.columns.is_some()).flat_map(|fused| fused.names)
}

/// The name of the module of a weight matrix.
pub(crate) fn module_name(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// The names of a kind of tensor of some modules of a layer.
pub(crate) fn tensor_names(layer: usize, parts: &[&str], kind: &str) -> Vec<String> {
    parts.iter().map(|part| format!("model.layers.{layer}.{part}.{kind}")).collect()
}

pub(crate) fn weight_name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
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
