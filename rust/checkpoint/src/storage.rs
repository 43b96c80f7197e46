//! The supported types of stored tensors: block sizes and names.

use std::fmt;

use penstock_types::Dtype;

/// The type of a tensor on disk. Quantised types are ggml's: blocks of 32 or 256 consecutive elements of a row share
/// scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Storage {
    /// IEEE double precision, rounded to single precision when it is read.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain floating point: the upper half of a single.
    Bf16,
    /// 32 elements of 4 bits, one scale, offset 8.
    Q4_0,
    /// 32 elements of 4 bits, one scale, one minimum.
    Q4_1,
    /// 32 elements of 5 bits, one scale, offset 16.
    Q5_0,
    /// 32 elements of 5 bits, one scale, one minimum.
    Q5_1,
    /// 32 elements of 8 bits, one scale.
    Q8_0,
    /// 256 elements of 2 bits; 4-bit scales and minima for each 16.
    Q2K,
    /// 256 elements of 3 bits; 6-bit scales for each 16.
    Q3K,
    /// 256 elements of 4 bits; 6-bit scales and minima for each 32.
    Q4K,
    /// 256 elements of 5 bits; 6-bit scales and minima for each 32.
    Q5K,
    /// 256 elements of 6 bits; 8-bit scales for each 16.
    Q6K,
    /// 32 elements of 4 bits that are indices of a table, one scale.
    Iq4Nl,
    /// 256 elements of the same kind; 6-bit scales for each 32.
    Iq4Xs,
}

impl Storage {
    /// Names of all types, for error messages.
    pub(crate) const SUPPORTED: &'static str =
        "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, F64";

    /// Elements per block; 1 for plain types.
    pub(crate) const fn block_elements(self) -> usize {
        match self {
            Storage::F64 | Storage::F32 | Storage::F16 | Storage::Bf16 => 1,
            Storage::Q4_0
            | Storage::Q4_1
            | Storage::Q5_0
            | Storage::Q5_1
            | Storage::Q8_0
            | Storage::Iq4Nl => 32,
            Storage::Q2K | Storage::Q3K | Storage::Q4K | Storage::Q5K | Storage::Q6K | Storage::Iq4Xs => 256,
        }
    }

    /// Bytes per block.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Storage::F64 => 8,
            Storage::F32 => 4,
            Storage::F16 | Storage::Bf16 => 2,
            Storage::Q4_0 | Storage::Iq4Nl => 2 + 16,
            Storage::Q4_1 => 2 + 2 + 16,
            Storage::Q5_0 => 2 + 4 + 16,
            Storage::Q5_1 => 2 + 2 + 4 + 16,
            Storage::Q8_0 => 2 + 32,
            Storage::Q2K => 16 + 64 + 2 + 2,
            Storage::Q3K => 32 + 64 + 12 + 2,
            Storage::Q4K => 2 + 2 + 12 + 128,
            Storage::Q5K => 2 + 2 + 12 + 32 + 128,
            Storage::Q6K => 128 + 64 + 16 + 2,
            Storage::Iq4Xs => 2 + 2 + 4 + 128,
        }
    }

    /// The type that weights of this type have in memory by default; bfloat16 for quantised types, whose quantisation
    /// error is larger than its rounding error.
    pub(crate) const fn dtype(self) -> Dtype {
        match self {
            Storage::F16 => Dtype::F16,
            Storage::F64 | Storage::F32 => Dtype::F32,
            _ => Dtype::Bf16,
        }
    }

    /// Size in bytes of this many elements of a row, or `None` if they are not a multiple of the block size or the size
    /// overflows.
    pub(crate) fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Storage::F64 => "F64",
            Storage::F32 => "F32",
            Storage::F16 => "F16",
            Storage::Bf16 => "BF16",
            Storage::Q4_0 => "Q4_0",
            Storage::Q4_1 => "Q4_1",
            Storage::Q5_0 => "Q5_0",
            Storage::Q5_1 => "Q5_1",
            Storage::Q8_0 => "Q8_0",
            Storage::Q2K => "Q2_K",
            Storage::Q3K => "Q3_K",
            Storage::Q4K => "Q4_K",
            Storage::Q5K => "Q5_K",
            Storage::Q6K => "Q6_K",
            Storage::Iq4Nl => "IQ4_NL",
            Storage::Iq4Xs => "IQ4_XS",
        })
    }
}
