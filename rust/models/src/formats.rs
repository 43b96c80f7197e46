//! The format of each weight matrix in memory.

use std::collections::BTreeMap;

use penstock_checkpoint::Checkpoint;
use penstock_device::Backend;
use penstock_types::{Activations, CodeBits, Dtype, Grid, Minimum, Quantization, ScaleFormat, WeightFormat};

use crate::weights::{EMBEDDING, HEAD};

const INT8: Grid = Grid {
    bits: CodeBits::Eight,
    group: Some(128),
    scales: ScaleFormat::Bf16,
    minimum: Minimum::Centred,
    activations: Activations::Int8,
};

const INT4: Grid = Grid { bits: CodeBits::Four, group: Some(32), minimum: Minimum::Stored, ..INT8 };

const fn weight_only(grid: Grid) -> Grid {
    Grid { activations: Activations::Float, ..grid }
}

/// The format of each weight matrix, by the name of its tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightFormats {
    default: WeightFormat,
    others: BTreeMap<String, WeightFormat>,
}

impl WeightFormats {
    /// All matrices in the same format.
    pub fn uniform(format: WeightFormat) -> Self {
        Self { default: format, others: BTreeMap::new() }
    }

    /// The formats of the matrices of `checkpoint`: those of `quantization`, or as they are stored. Other matrices are in
    /// `dtype`.
    pub fn new<B: Backend>(
        backend: &B,
        checkpoint: &Checkpoint,
        dtype: Dtype,
        quantization: Option<Quantization>,
    ) -> Self {
        let own = match quantization {
            None => return Self::as_stored(backend, checkpoint, dtype),
            Some(Quantization::None) => return Self::uniform(dtype.into()),
            Some(Quantization::Int8) => (INT8, INT8),
            Some(Quantization::Int4) => (INT4, INT8),
            Some(Quantization::W8A16) => (weight_only(INT8), weight_only(INT8)),
            Some(Quantization::W4A16) => (weight_only(INT4), weight_only(INT8)),
        };
        let mut formats = Self::uniform(WeightFormat::Grid(own.0));
        for name in [EMBEDDING, HEAD] {
            formats.others.insert(name.to_owned(), WeightFormat::Grid(own.1));
        }
        formats
    }

    fn as_stored<B: Backend>(backend: &B, checkpoint: &Checkpoint, dtype: Dtype) -> Self {
        let mut formats = Self::uniform(dtype.into());
        for name in checkpoint.names() {
            if let Ok(tensor) = checkpoint.tensor(name)
                && let format @ WeightFormat::Grid(_) = tensor.format()
                && backend.supports(format, tensor.columns())
            {
                formats.others.insert(name.to_owned(), format);
            }
        }
        formats
    }

    /// The same, with another type of the matrices that are not quantised.
    pub fn with_dtype(&self, dtype: Dtype) -> Self {
        let default = match self.default {
            WeightFormat::Float(_) => dtype.into(),
            grid @ WeightFormat::Grid(_) => grid,
        };
        Self { default, others: self.others.clone() }
    }

    /// The format of a tensor.
    pub fn of(&self, name: &str) -> WeightFormat {
        self.others.get(name).copied().unwrap_or(self.default)
    }
}
