//! The number types of weights and of the KV cache.

use half::{bf16, f16};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::enums::{Dtype, KvDtype};
use crate::named::Named;

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

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::from_name(&name).ok_or_else(|| D::Error::custom(format_args!("unknown dtype {name:?}")))
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

/// Converts half to single precision without branches (loops over it are
/// vectorised), exactly for every value. Subnormals are converted as integers,
/// not as subnormal singles, so the result does not depend on the processor's flush-to-zero mode.
#[inline(always)]
pub fn f16_to_f32(half: u16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    let half = u32::from(half);
    let (sign, magnitude) = ((half & 0x8000) << 16, half & 0x7fff);
    let normal = (magnitude << 13) + REBIAS;
    let subnormal = (magnitude as f32 * (1.0 / 16_777_216.0)).to_bits();
    let bits = if magnitude < 0x0400 { subnormal } else { normal };
    let bits = if magnitude >= 0x7c00 { normal + REBIAS } else { bits };
    f32::from_bits(sign | bits)
}
