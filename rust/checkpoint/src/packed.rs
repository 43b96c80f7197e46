//! Quantised matrices whose codes, scales and zero points are separate tensors.
//!
//! A weight is `scale * (code - zero)`, rounded after the product.

use std::ops::Range;

use penstock_types::{
    Activations, CodeBits, Dtype, Grid, GridRows, MAX_E4M3_SCALE, Minimum, ScaleFormat, WeightFormat,
    f16_to_f32,
};

use crate::mapped::MappedFile;

/// Bytes of a file. The range is inside the file.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    pub(crate) file: usize,
    pub(crate) range: Range<usize>,
}

impl Location {
    pub(crate) fn bytes<'a>(&self, files: &'a [MappedFile]) -> &'a [u8] {
        &files[self.file].bytes()[self.range.clone()]
    }

    /// The 32-bit words of the range.
    fn words<'a>(&self, files: &'a [MappedFile]) -> &'a [[u8; 4]] {
        self.bytes(files).as_chunks().0
    }
}

/// A matrix of `rows` output features and `columns` input features. The sizes of all parts match.
#[derive(Clone, Debug)]
pub(crate) struct PackedMatrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) codes: Codes,
    pub(crate) scales: Scales,
    pub(crate) zeros: Zeros,
    pub(crate) groups: ColumnGroups,
    pub(crate) activations: Activations,
}

#[derive(Clone, Debug)]
pub(crate) struct Codes {
    pub(crate) at: Location,
    pub(crate) order: CodeOrder,
}

/// The order of codes in a file. Words have 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeOrder {
    /// `[columns / 8, rows]` words of 4-bit codes or `[columns / 4, rows]` words of 8-bit codes: consecutive columns of
    /// a row, lowest bits first.
    ColumnWords(CodeBits),
    /// `[columns, rows / 8]` words of 4-bit codes: rows in the order of [`AWQ_NIBBLES`].
    AwqWords,
    /// Rows of 4-bit codes, low nibble first, padded to words.
    Nibbles,
    /// Rows of bytes, padded to words.
    Bytes,
    /// Rows of signed bytes: the code minus 128.
    SignedBytes,
    /// Rows of 8-bit floating-point numbers (E4M3).
    Float8,
}

/// The nibble of each of eight consecutive output features in a word of an AWQ file.
const AWQ_NIBBLES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl CodeOrder {
    fn bits(self) -> CodeBits {
        match self {
            CodeOrder::ColumnWords(bits) => bits,
            CodeOrder::AwqWords | CodeOrder::Nibbles => CodeBits::Four,
            CodeOrder::Bytes | CodeOrder::SignedBytes => CodeBits::Eight,
            CodeOrder::Float8 => CodeBits::E4m3,
        }
    }
}

/// Scales: that of a row and a group is at index `row / rows * row_stride + group * group_stride`.
#[derive(Clone, Debug)]
pub(crate) struct Scales {
    pub(crate) at: Location,
    pub(crate) dtype: Dtype,
    /// Rows that share a scale.
    pub(crate) rows: usize,
    pub(crate) row_stride: usize,
    pub(crate) group_stride: usize,
}

impl Scales {
    fn get(&self, bytes: &[u8], row: usize, group: usize) -> f32 {
        let index = row / self.rows * self.row_stride + group * self.group_stride;
        self.number(bytes, index)
    }

    fn number(&self, bytes: &[u8], index: usize) -> f32 {
        match self.dtype {
            Dtype::F32 => f32::from_le_bytes(bytes.as_chunks().0[index]),
            Dtype::F16 => f16_to_f32(u16::from_le_bytes(bytes.as_chunks().0[index])),
            Dtype::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes(bytes.as_chunks().0[index])) << 16),
        }
    }
}

/// The codes of zero, in the same bits as the codes.
#[derive(Clone, Debug)]
pub(crate) enum Zeros {
    /// `2^(bits - 1)` for all groups; zero for floating-point codes.
    Centre,
    /// `[groups, rows / n]` words of `n` codes, lowest bits first; `plus` is added.
    RowWords { at: Location, plus: u32 },
    /// The same in the order of [`AWQ_NIBBLES`].
    AwqWords(Location),
    /// `[rows / n, groups]` words of `n` codes, lowest bits first.
    GroupWords(Location),
    /// `[rows, groups]` signed bytes: the code minus `2^(bits - 1)`.
    SignedBytes(Location),
}

/// The group of each column.
#[derive(Clone, Debug)]
pub(crate) enum ColumnGroups {
    /// Groups of this many consecutive columns.
    Width(usize),
    /// The group of each column.
    Indices(Vec<u32>),
}

impl PackedMatrix {
    /// The type in the file, for display.
    pub(crate) fn type_name(&self) -> &'static str {
        match self.codes.order.bits() {
            CodeBits::E4m3 => "F8_E4M3",
            CodeBits::Four => "INT4",
            _ => "INT8",
        }
    }

    /// The format that holds the values exactly; plain numbers if the values are no grid: groups of arbitrary columns,
    /// groups whose width is no multiple of 16, and floating-point codes with large scales.
    pub(crate) fn format(&self, files: &[MappedFile]) -> WeightFormat {
        match self.grid() {
            Some(grid) if grid.bits != CodeBits::E4m3 || self.has_small_scales(files) => {
                WeightFormat::Grid(grid)
            }
            _ => WeightFormat::Float(Dtype::Bf16),
        }
    }

    fn has_small_scales(&self, files: &[MappedFile]) -> bool {
        let bytes = self.scales.at.bytes(files);
        let mut scales =
            (0..bytes.len() / self.scales.dtype.bytes()).map(|index| self.scales.number(bytes, index));
        scales.all(|scale| scale.abs() < MAX_E4M3_SCALE)
    }

    fn grid(&self) -> Option<Grid> {
        let group = match &self.groups {
            ColumnGroups::Indices(_) => return None,
            ColumnGroups::Width(width) if *width >= self.columns => None,
            ColumnGroups::Width(width) if !width.is_multiple_of(16) => return None,
            ColumnGroups::Width(width) => Some(u16::try_from(*width).ok()?),
        };
        Some(Grid {
            bits: self.codes.order.bits(),
            group,
            scales: match self.scales.dtype {
                Dtype::F32 => ScaleFormat::F32,
                Dtype::F16 => ScaleFormat::F16,
                Dtype::Bf16 => ScaleFormat::Bf16,
            },
            minimum: match self.zeros {
                Zeros::Centre => Minimum::Centred,
                _ => Minimum::ZeroPoint,
            },
            activations: self.activations,
        })
    }

    /// All parts of the matrix in the files.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Location> {
        let zeros = match &self.zeros {
            Zeros::Centre => None,
            Zeros::RowWords { at, .. }
            | Zeros::AwqWords(at)
            | Zeros::GroupWords(at)
            | Zeros::SignedBytes(at) => Some(at),
        };
        [&self.codes.at, &self.scales.at].into_iter().chain(zeros)
    }

    pub(crate) fn read_rows(&self, files: &[MappedFile], rows: Range<usize>, out: &mut [f32]) {
        /// A cache line of words of GPTQ codes.
        const ROWS: usize = 16;
        let columns = self.columns;
        let mut codes = vec![0; ROWS.min(rows.len()) * columns];
        for (first, out) in rows.clone().step_by(ROWS).zip(out.chunks_mut(ROWS * columns)) {
            let codes = &mut codes[..out.len()];
            self.read_codes(files, first..first + out.len() / columns, codes);
            let lines = codes.chunks_exact(columns).zip(out.chunks_exact_mut(columns));
            for (row, (codes, out)) in (first..).zip(lines) {
                self.dequantize_row(files, row, codes, out);
            }
        }
    }

    fn dequantize_row(&self, files: &[MappedFile], row: usize, codes: &[u8], out: &mut [f32]) {
        let scales = self.scales.at.bytes(files);
        let factors = |group| (self.scales.get(scales, row, group), self.zero(files, row, group));
        match &self.groups {
            ColumnGroups::Indices(groups) => {
                for ((out, code), group) in out.iter_mut().zip(codes).zip(groups) {
                    let (scale, zero) = factors(*group as usize);
                    *out = scale * (f32::from(*code) - zero);
                }
            }
            ColumnGroups::Width(width) => {
                for (group, (out, codes)) in out.chunks_mut(*width).zip(codes.chunks(*width)).enumerate() {
                    let (scale, zero) = factors(group);
                    if self.codes.order == CodeOrder::Float8 {
                        out.iter_mut()
                            .zip(codes)
                            .for_each(|(out, code)| *out = scale * CodeBits::E4m3.value(*code));
                    } else {
                        out.iter_mut()
                            .zip(codes)
                            .for_each(|(out, code)| *out = scale * (f32::from(*code) - zero));
                    }
                }
            }
        }
    }

    /// Reads the codes, scales and zero points of rows. The format is a grid.
    pub(crate) fn read_grid(&self, files: &[MappedFile], rows: Range<usize>, out: &mut GridRows) {
        let grid = self.grid().expect("the caller has checked the format; this is a bug");
        let groups = grid.groups(self.columns);
        out.resize(&grid, rows.len(), self.columns);
        self.read_codes(files, rows.clone(), &mut out.codes);
        let scales = self.scales.at.bytes(files);
        for (at, row) in rows.enumerate() {
            for group in 0..groups {
                out.scales[at * groups + group] = self.scales.get(scales, row, group);
                if let Some(zero) = out.minima.get_mut(at * groups + group) {
                    *zero = self.zero(files, row, group);
                }
            }
        }
    }

    fn read_codes(&self, files: &[MappedFile], rows: Range<usize>, out: &mut [u8]) {
        let columns = self.columns;
        let bytes = self.codes.at.bytes(files);
        let stride = bytes.len() / self.rows;
        let lines = rows.clone().zip(out.chunks_exact_mut(columns));
        match self.codes.order {
            CodeOrder::ColumnWords(bits) => {
                let per_word = (32 / bits.count()) as usize;
                for (at, words) in self.codes.at.words(files).chunks_exact(self.rows).enumerate() {
                    for (word, out) in words[rows.clone()].iter().zip(out.chunks_exact_mut(columns)) {
                        let out = &mut out[at * per_word..][..per_word];
                        match bits {
                            CodeBits::Four => out.copy_from_slice(&nibbles(*word)),
                            _ => out.copy_from_slice(word),
                        }
                    }
                }
            }
            CodeOrder::AwqWords => {
                /// Columns that are unpacked together.
                const COLUMNS: usize = 16;
                let (words, words_per_column) = (self.codes.at.words(files), self.rows / 8);
                for first in (0..columns).step_by(COLUMNS) {
                    let count = COLUMNS.min(columns - first);
                    for at in rows.start / 8..rows.end.div_ceil(8) {
                        let mut column_words = [0; COLUMNS];
                        for (column, word) in (first..).zip(&mut column_words[..count]) {
                            *word = u32::from_le_bytes(words[column * words_per_column + at]);
                        }
                        for row in rows.start.max(8 * at)..rows.end.min(8 * at + 8) {
                            let shift = 4 * AWQ_NIBBLES[row % 8];
                            let out = &mut out[(row - rows.start) * columns + first..][..count];
                            for (out, word) in out.iter_mut().zip(&column_words) {
                                *out = (word >> shift & 15) as u8;
                            }
                        }
                    }
                }
            }
            CodeOrder::Nibbles => {
                for (row, out) in lines {
                    let words = bytes[row * stride..][..stride].as_chunks().0;
                    for (out, word) in out.chunks_mut(8).zip(words) {
                        out.copy_from_slice(&nibbles(*word)[..out.len()]);
                    }
                }
            }
            CodeOrder::Bytes | CodeOrder::Float8 => {
                lines.for_each(|(row, out)| out.copy_from_slice(&bytes[row * stride..][..columns]));
            }
            CodeOrder::SignedBytes => {
                for (row, out) in lines {
                    let bytes = &bytes[row * stride..][..columns];
                    out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte ^ 0x80);
                }
            }
        }
    }

    /// The code of zero in a group.
    fn zero(&self, files: &[MappedFile], row: usize, group: usize) -> f32 {
        let bits = self.codes.order.bits();
        let per_word = (32 / bits.count()) as usize;
        let code = |word: [u8; 4]| {
            let shift = (row % per_word) as u32 * bits.count();
            u32::from_le_bytes(word) >> shift & ((1 << bits.count()) - 1)
        };
        let zero = match &self.zeros {
            Zeros::Centre => bits.centre() as u32,
            Zeros::RowWords { at, plus } => {
                code(at.words(files)[group * (self.rows / per_word) + row / per_word]) + plus
            }
            Zeros::AwqWords(at) => {
                awq_nibble(at.words(files)[group * (self.rows / per_word) + row / per_word], row).into()
            }
            Zeros::GroupWords(at) => {
                let words = at.words(files);
                code(words[row / per_word * (words.len() / self.rows.div_ceil(per_word)) + group])
            }
            Zeros::SignedBytes(at) => {
                let bytes = at.bytes(files);
                let zero = bytes[row * (bytes.len() / self.rows) + group].cast_signed();
                return (i32::from(zero) + bits.centre()) as f32;
            }
        };
        zero as f32
    }
}

fn awq_nibble(word: [u8; 4], row: usize) -> u8 {
    (u32::from_le_bytes(word) >> (4 * AWQ_NIBBLES[row % 8]) & 15) as u8
}

/// The nibbles of a word, lowest bits first.
#[inline(always)]
fn nibbles(word: [u8; 4]) -> [u8; 8] {
    let word = u64::from(u32::from_le_bytes(word));
    let word = (word | word << 16) & 0x0000_ffff_0000_ffff;
    let word = (word | word << 8) & 0x00ff_00ff_00ff_00ff;
    let word = (word | word << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    word.to_le_bytes()
}
