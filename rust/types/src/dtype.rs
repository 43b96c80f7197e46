//! The number types of weights and of the KV cache.

use half::{bf16, f16};

use crate::enums::{Dtype, KvDtype};

impl Dtype {
    /// Bytes of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// `value` rounded to this type: to the nearest, ties to even.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

impl From<Dtype> for KvDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}
