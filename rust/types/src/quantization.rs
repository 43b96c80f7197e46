//! The requested quantisation of the weights of a model.

use std::fmt;

use crate::enums::WeightType;
use crate::named::{Auto, Named};
use crate::weight::{Activations, CodeBits, Grid, Minimum, ScaleFormat};

/// The group sizes of [`WeightScheme::group_size`].
pub const GROUP_SIZES: [i16; 4] = [32, 64, 128, -1];

/// The requested formats of the weight matrices of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantization {
    /// The scheme of matrices that no other field applies to.
    pub default: WeightScheme,
    /// The embedding table; by default see [`WeightScheme::of_tables`].
    pub embedding: Option<WeightScheme>,
    /// The output head, likewise.
    pub head: Option<WeightScheme>,
    /// Patterns of module names, with schemes. The first pattern that matches a name applies.
    pub layers: Vec<(String, WeightScheme)>,
}

/// The requested format of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightScheme {
    /// `Auto(None)` for the format of the file.
    pub weight_type: Auto<WeightType>,
    /// Columns that share a scale: one of [`GROUP_SIZES`]; -1 for all columns of a row.
    pub group_size: Option<i16>,
    /// Whether codes are centred on zero, without a minimum for each group.
    pub symmetric: Option<bool>,
}

/// The type of most matrices.
impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.default.weight_type.name())?;
        if *self == Self::from(self.default.weight_type) { Ok(()) } else { f.write_str(" with options") }
    }
}

impl From<Auto<WeightType>> for Quantization {
    fn from(weight_type: Auto<WeightType>) -> Self {
        Self { default: weight_type.into(), ..Self::default() }
    }
}

impl From<WeightType> for Quantization {
    fn from(weight_type: WeightType) -> Self {
        Auto(Some(weight_type)).into()
    }
}

impl From<Auto<WeightType>> for WeightScheme {
    fn from(weight_type: Auto<WeightType>) -> Self {
        Self { weight_type, group_size: None, symmetric: None }
    }
}

impl Default for WeightScheme {
    fn default() -> Self {
        Auto(None).into()
    }
}

impl WeightScheme {
    /// The default scheme of the embedding table and of the head if the layers have `self`: 8 bits if the layers have
    /// 4.
    pub fn of_tables(self) -> Self {
        match self.weight_type.0 {
            Some(WeightType::Int4) => Auto(Some(WeightType::Int8)).into(),
            Some(WeightType::W4A16) => Auto(Some(WeightType::W8A16)).into(),
            _ => self,
        }
    }

    /// The format of the codes; `None` if the weights are not quantised or in the format of the file.
    pub fn grid(self) -> Option<Grid> {
        let mut scales = ScaleFormat::Bf16;
        let (bits, activations, group, minimum) = match self.weight_type.0? {
            WeightType::None => return None,
            WeightType::Int8 => (CodeBits::Eight, Activations::Int8, 128, Minimum::Centred),
            WeightType::Int4 => (CodeBits::Four, Activations::Int8, 32, Minimum::Stored),
            WeightType::W8A16 => (CodeBits::Eight, Activations::Float, 128, Minimum::Centred),
            WeightType::W4A16 => (CodeBits::Four, Activations::Float, 32, Minimum::Stored),
            WeightType::Fp8 => {
                scales = ScaleFormat::F32;
                (CodeBits::E4m3, Activations::Fp8, -1, Minimum::Centred)
            }
        };
        Some(Grid {
            bits,
            group: u16::try_from(self.group_size.unwrap_or(group)).ok(),
            scales,
            minimum: match self.symmetric {
                None => minimum,
                Some(true) => Minimum::Centred,
                Some(false) => Minimum::Stored,
            },
            activations,
        })
    }
}
