//! All weights of a decoder: their declaration, and their list.

use std::convert::Infallible;

use crate::blocks::{Declaration, Fused, Layer, Tensors};
use crate::config::ModelConfig;

/// The embedding table, and the head if it is a separate matrix.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// The weights of a decoder.
pub(crate) struct Model<M, V> {
    pub(crate) embedding: M,
    pub(crate) layers: Vec<Layer<M, V>>,
    pub(crate) norm: V,
    /// `None` if the embedding is the head.
    pub(crate) head: Option<M>,
}

impl<M, V> Model<M, V> {
    /// Declares all tensors of a model.
    pub(crate) fn declare<T: Tensors<Matrix = M, Vector = V>>(
        tensors: &mut T,
        config: &ModelConfig,
    ) -> Result<Self, T::Error> {
        let ModelConfig { vocabulary_size, hidden_size, heads, .. } = *config;
        let mut tensors = Declaration::new(tensors);
        let embedding = tensors.table(EMBEDDING, vocabulary_size, hidden_size)?;
        let mut layers = Vec::with_capacity(config.num_layers());
        for (layer, spec) in config.layers.iter().enumerate() {
            tensors.set_layer(layer);
            layers.push(Layer::declare(&mut tensors, spec, heads, hidden_size)?);
        }
        let norm = tensors.vector("model.norm.weight", hidden_size)?;
        let head = match config.tied_head {
            true => None,
            false => Some(tensors.table(HEAD, vocabulary_size, hidden_size)?),
        };
        Ok(Self { embedding, layers, norm, head })
    }
}

/// Lists what is declared.
#[derive(Default)]
struct Listed {
    matrices: Vec<Fused>,
    vectors: Vec<Fused>,
}

impl Tensors for Listed {
    type Matrix = ();
    type Vector = ();
    type Error = Infallible;

    fn matrix(&mut self, fused: Fused) -> Result<(), Infallible> {
        self.matrices.push(fused);
        Ok(())
    }

    fn vector(&mut self, fused: Fused) -> Result<(), Infallible> {
        self.vectors.push(fused);
        Ok(())
    }
}

/// The weights of a model, matrices first.
pub(crate) fn weights_of(config: &ModelConfig) -> Vec<Fused> {
    let mut listed = Listed::default();
    let Ok(_) = Model::declare(&mut listed, config);
    listed.matrices.extend(listed.vectors);
    listed.matrices
}

impl ModelConfig {
    /// Number of weights; tied weights count once.
    pub fn num_parameters(&self) -> u64 {
        weights_of(self).iter().map(Fused::num_parameters).sum()
    }
}

/// The names of all weight matrices.
pub(crate) fn matrix_names(config: &ModelConfig) -> impl Iterator<Item = String> {
    weights_of(config).into_iter().filter(|fused| fused.columns.is_some()).flat_map(|fused| fused.names)
}
