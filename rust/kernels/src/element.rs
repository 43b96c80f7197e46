//! How a number of a weight matrix or of the KV cache is stored, and where it lies inside a panel.
//!
//! A *panel* is 16 lanes by `k` steps. For a weight matrix the lanes are output rows and the steps are columns; for
//! keys the lanes are tokens and the steps are dimensions; for values the lanes are dimensions and the steps are
//! tokens. One microkernel multiplies all three.
//!
//! ```text
//! F32, F16   [k][16]         one step is one run of 16 numbers
//! Bf16       [k/2][16][2]    one 32-bit lane holds step k (low half) and step k + 1 (high half)
//! ```
//!
//! bf16 widens to f32 by a shift or by a mask, so a pair in one lane costs one cheap operation per step and no
//! shuffle; dot-product instructions over bf16 pairs (AVX512-BF16, AMX, NEON) want the very same order. f16 needs a
//! conversion instruction, and that takes 8 neighbours of memory into 8 lanes (`vcvtph2ps ymm, m128`): a paired
//! order would add two shuffles per step for nothing.

use half::{bf16, f16};

/// Lanes of a panel.
pub(crate) const LANES: usize = 16;

/// The storage type of weights and of the KV cache; arithmetic is always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl Element {
    /// Every element type.
    pub const ALL: &[Element] = &[Element::F32, Element::F16, Element::Bf16];

    /// As users spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "float32",
            Element::F16 => "float16",
            Element::Bf16 => "bfloat16",
        }
    }

    /// Bytes of one stored number.
    pub const fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
        }
    }

    /// `value` after a round trip through this storage type (to the nearest, ties to even).
    pub fn round(self, value: f32) -> f32 {
        match self {
            Element::F32 => value,
            Element::F16 => f16::from_f32(value).to_f32(),
            Element::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }

    /// Bytes of a panel of `steps` steps: the steps are rounded up to even, so that panels stay whole cache lines.
    pub(crate) const fn panel_bytes(self, steps: usize) -> usize {
        steps.next_multiple_of(2) * LANES * self.bytes()
    }

    /// Where step `k` of `lane` lies in a panel, counted in elements.
    pub(crate) const fn panel_index(self, k: usize, lane: usize) -> usize {
        match self {
            Element::F32 | Element::F16 => k * LANES + lane,
            Element::Bf16 => (k / 2) * (2 * LANES) + lane * 2 + k % 2,
        }
    }

    /// Reads element `index` of `bytes`.
    #[inline]
    pub(crate) fn get(self, bytes: &[u8], index: usize) -> f32 {
        let at = index * self.bytes();
        match self {
            Element::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
            Element::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
            Element::Bf16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
        }
    }

    /// Rounds `count` numbers to this type and writes them to `bytes`: number i is `place(type, i).1` and goes to
    /// element `place(type, i).0`. The type is passed back so that it is a constant inside of the loops.
    #[inline(always)]
    pub(crate) fn set_all(
        self,
        bytes: &mut [u8],
        count: usize,
        place: impl Fn(Element, usize) -> (usize, f32),
    ) {
        match self {
            Element::F32 => {
                for i in 0..count {
                    let (index, value) = place(Element::F32, i);
                    bytes[4 * index..][..4].copy_from_slice(&value.to_le_bytes());
                }
            }
            Element::F16 => {
                for i in 0..count {
                    let (index, value) = place(Element::F16, i);
                    bytes[2 * index..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
                }
            }
            Element::Bf16 => {
                for i in 0..count {
                    let (index, value) = place(Element::Bf16, i);
                    bytes[2 * index..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                }
            }
        }
    }
}
