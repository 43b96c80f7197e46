//! The number types of weights and of the KV cache.

use half::{bf16, f16};

/// A floating-point type that weights are stored in. Arithmetic is in float32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a float32.
    Bf16,
}

impl Dtype {
    /// Every type.
    pub const ALL: &[Self] = &[Self::F32, Self::F16, Self::Bf16];

    /// The name in the Python API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// The type with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

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

/// The type that keys and values are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a float32.
    Bf16,
    /// 8-bit integers, with a scale and an offset for each token and head.
    Int8,
    /// 4-bit integers, with a scale and an offset for each token and head.
    Uint4,
}

impl KvDtype {
    /// Every type.
    pub const ALL: &[Self] = &[Self::F32, Self::F16, Self::Bf16, Self::Int8, Self::Uint4];

    /// The name in the Python API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => Dtype::F32.name(),
            Self::F16 => Dtype::F16.name(),
            Self::Bf16 => Dtype::Bf16.name(),
            Self::Int8 => "int8",
            Self::Uint4 => "uint4",
        }
    }

    /// The type with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
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
