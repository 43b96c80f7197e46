//! The formats of weight matrices: plain numbers, or integer codes with scales.

use serde::{Deserialize, Serialize};

use crate::enums::Dtype;

/// The format of a weight matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightFormat {
    /// Plain numbers.
    Float(Dtype),
    /// Integer codes with scales.
    Grid(Grid),
}

/// Integer codes with scales. A group is some consecutive columns of one row.
///
/// ```text
/// weight = scale of the group * value of the code + minimum of the group
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grid {
    /// Bits of a code.
    pub bits: CodeBits,
    /// Columns of a group: a multiple of 16. `None` if a group is a whole row.
    pub group: Option<u16>,
    /// The type of the scales.
    pub scales: ScaleFormat,
    /// The minimum of a group.
    pub minimum: Minimum,
    /// The type of the activations in a product.
    pub activations: Activations,
}

/// The type of a code: an unsigned integer, or a floating-point number of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CodeBits {
    /// 0 to 15.
    Four,
    /// 0 to 31.
    Five,
    /// 0 to 63.
    Six,
    /// 0 to 255.
    Eight,
    /// 4 bits of exponent and 3 of mantissa, no infinities (E4M3FN). Only with [`Minimum::Centred`],
    /// [`Activations::Float`] and scales below [`MAX_E4M3_SCALE`].
    E4m3,
}

/// The scales of [`CodeBits::E4m3`] are below this power of two, so that a product can multiply them by `2^120`.
pub const MAX_E4M3_SCALE: f32 = 128.0;

/// The numbers of [`CodeBits::E4m3`].
static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
};

/// The type of the scales of a [`Grid`], and of the minima that are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScaleFormat {
    /// Float32.
    F32,
    /// Float16.
    F16,
    /// Bfloat16.
    Bf16,
    /// A signed 8-bit integer for each group times a float16 for each [`OUTER_GROUP`] columns.
    Nested,
}

/// Columns that share the outer factor of [`ScaleFormat::Nested`].
pub const OUTER_GROUP: usize = 256;

/// The minimum of each group of a [`Grid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Minimum {
    /// `-scale * 2^(bits - 1)`: the codes are centred.
    Centred,
    /// Stored, in the type of the scales. With nested scales it has an outer factor of its own.
    Stored,
    /// `-scale * zero`, with an 8-bit `zero` for each group.
    ZeroPoint,
}

/// The type of the activations in a product with a [`Grid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activations {
    /// Rounded to 8-bit integers, with a scale for each group of at least 32 columns. Sums are integers.
    Int8,
    /// Rounded to e4m3, with a scale for each group, on devices that multiply e4m3; as `Float` on others.
    Fp8,
    /// Float32, times the weights as float32.
    Float,
}

impl From<Dtype> for WeightFormat {
    fn from(dtype: Dtype) -> Self {
        Self::Float(dtype)
    }
}

impl WeightFormat {
    /// The same weights, multiplied by activations of this type. Plain numbers are always multiplied by floats.
    pub const fn with_activations(self, activations: Activations) -> Self {
        match self {
            Self::Float(_) => self,
            Self::Grid(grid) => Self::Grid(Grid { activations, ..grid }),
        }
    }

    /// Bytes of a matrix, without padding.
    pub const fn bytes(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Float(dtype) => rows * columns * dtype.bytes(),
            Self::Grid(grid) => rows * grid.row_bytes(columns),
        }
    }

    /// The activations in a product with it.
    pub const fn activations(self) -> Activations {
        match self {
            Self::Float(_) => Activations::Float,
            Self::Grid(grid) => grid.activations,
        }
    }

    /// Whether activations are rounded to 8-bit integers for it.
    pub const fn reads_codes(self) -> bool {
        matches!(self, Self::Grid(Grid { activations: Activations::Int8, .. }))
    }
}

impl CodeBits {
    /// The number of bits.
    #[inline]
    pub const fn count(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Five => 5,
            Self::Six => 6,
            Self::Eight | Self::E4m3 => 8,
        }
    }

    /// `int4` and so on, or `fp8`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Four => "int4",
            Self::Five => "int5",
            Self::Six => "int6",
            Self::Eight => "int8",
            Self::E4m3 => "fp8",
        }
    }

    /// The value of the zero in [`Minimum::Centred`].
    #[inline]
    pub const fn centre(self) -> i32 {
        match self {
            Self::E4m3 => 0,
            _ => 1 << (self.count() - 1),
        }
    }

    /// The value of a code.
    #[inline]
    pub fn value(self, code: u8) -> f32 {
        match self {
            Self::E4m3 => E4M3[usize::from(code)],
            _ => f32::from(code),
        }
    }
}

impl ScaleFormat {
    /// Bytes of a scale of a group.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Nested => 1,
        }
    }
}

impl Grid {
    /// Groups of a row.
    pub const fn groups(&self, columns: usize) -> usize {
        match self.group {
            None => 1,
            Some(group) => columns.div_ceil(group as usize),
        }
    }

    /// Bytes of a row, without padding.
    pub const fn row_bytes(&self, columns: usize) -> usize {
        let scale = self.scales.bytes();
        let (minimum, outer) = match self.minimum {
            Minimum::Centred => (0, 1),
            Minimum::Stored => (scale, 2),
            Minimum::ZeroPoint => (1, 1),
        };
        let codes = (columns * self.bits.count() as usize).div_ceil(8);
        codes + self.groups(columns) * (scale + minimum) + self.outer_groups(columns) * 2 * outer
    }

    /// Outer factors of a row; 0 if the scales are not nested.
    pub const fn outer_groups(&self, columns: usize) -> usize {
        match self.scales {
            ScaleFormat::Nested => columns.div_ceil(OUTER_GROUP),
            _ => 0,
        }
    }
}

/// Rows of a [`Grid`], row after row, in a neutral form: as a file reader or a quantiser writes them and before they
/// are packed. Scales and minima are exact in the types of the grid.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GridRows {
    /// One byte for each column.
    pub codes: Vec<u8>,
    /// One for each group. The integer, if nested.
    pub scales: Vec<f32>,
    /// One for each group: the minimum (the integer, if nested) or the zero point. Empty if centred.
    pub minima: Vec<f32>,
    /// One for each outer group. Empty if not nested.
    pub outer_scales: Vec<f32>,
    /// One for each outer group. Empty if not nested or without stored minima.
    pub outer_minima: Vec<f32>,
}

impl GridRows {
    /// Rows of zeros.
    pub fn new(grid: &Grid, rows: usize, columns: usize) -> Self {
        let mut new = Self::default();
        new.resize(grid, rows, columns);
        new
    }

    /// Changes the number of rows. The contents are unspecified.
    pub fn resize(&mut self, grid: &Grid, rows: usize, columns: usize) {
        let (groups, outer) = (rows * grid.groups(columns), rows * grid.outer_groups(columns));
        let stored = grid.minimum == Minimum::Stored;
        self.codes.resize(rows * columns, 0);
        self.scales.resize(groups, 0.0);
        self.minima.resize(if grid.minimum == Minimum::Centred { 0 } else { groups }, 0.0);
        self.outer_scales.resize(outer, 0.0);
        self.outer_minima.resize(if stored { outer } else { 0 }, 0.0);
    }

    /// Adds the rows of `other`, of the same grid and number of columns.
    pub fn append(&mut self, mut other: Self) {
        self.codes.append(&mut other.codes);
        self.scales.append(&mut other.scales);
        self.minima.append(&mut other.minima);
        self.outer_scales.append(&mut other.outer_scales);
        self.outer_minima.append(&mut other.outer_minima);
    }

    /// The scale and the minimum of a group of row `row`. Products are rounded to float32; they are exact for the types
    /// that have less than 24 bits.
    pub fn scale_and_minimum(&self, grid: &Grid, columns: usize, row: usize, group: usize) -> (f32, f32) {
        let at = row * grid.groups(columns) + group;
        let outer = grid.group.map_or(0, |width| group * usize::from(width) / OUTER_GROUP);
        let outer = row * grid.outer_groups(columns) + outer;
        let scale = self.scales[at] * self.outer_scales.get(outer).copied().unwrap_or(1.0);
        let minimum = match grid.minimum {
            Minimum::Centred => -scale * grid.bits.centre() as f32,
            Minimum::Stored => self.minima[at] * self.outer_minima.get(outer).copied().unwrap_or(1.0),
            Minimum::ZeroPoint => -scale * self.minima[at],
        };
        (scale, minimum)
    }

    /// Writes the weights of row `row`: `scale * (code - zero)`, rounded after the product, where `zero` is the centre
    /// or the zero point; `scale * code + minimum` with stored minima, rounded after the product and after the sum.
    pub fn dequantize_row(&self, grid: &Grid, columns: usize, row: usize, out: &mut [f32]) {
        let codes = &self.codes[row * columns..][..columns];
        let width = grid.group.map_or(columns, usize::from).max(1);
        for (group, (out, codes)) in out.chunks_mut(width).zip(codes.chunks(width)).enumerate() {
            let (scale, minimum) = self.scale_and_minimum(grid, columns, row, group);
            let zero = match grid.minimum {
                Minimum::Centred => grid.bits.centre() as f32,
                Minimum::ZeroPoint => self.minima[row * grid.groups(columns) + group],
                Minimum::Stored => {
                    out.iter_mut()
                        .zip(codes)
                        .for_each(|(out, code)| *out = scale * f32::from(*code) + minimum);
                    continue;
                }
            };
            if grid.bits == CodeBits::E4m3 {
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = scale * E4M3[usize::from(*code)]);
            } else {
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = scale * (f32::from(*code) - zero));
            }
        }
    }
}
