//! Operands: the rows that a matrix is multiplied by, `cuda/quantised_rows.cuh` if they are quantised.

use bytemuck::NoUninit;
use penstock_cuda::{DevicePointer, Parameter};
use penstock_types::{Activations, CodeBits, Dtype, WeightFormat};

use super::memory::CudaMemory;
use super::queue::Shape;
use super::{Cuda, quantised_matrix};
use crate::arena::Region;

/// Columns of a block of a quantised row, and its bytes.
const BLOCK: usize = 64;
const BLOCK_BYTES: usize = 80;
/// Columns of the smallest and of the largest group of values that have one scale.
const MIN_GROUP: usize = 32;
const MAX_GROUP: usize = 1024;
/// Columns that a block of threads quantises at a time.
const COLUMNS_OF_A_BLOCK: usize = 1024;
/// Alignment of the quantised rows of an operand.
const ALIGNMENT: usize = 256;

/// The form of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperandForm {
    Floats(Dtype),
    Quantised(Numbers, ScaleGroup),
}

/// The type of the numbers of quantised rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    Int8,
    Fp8,
}

/// The columns that have one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleGroup {
    Columns(usize),
    Row,
}

impl OperandForm {
    /// The form for a matrix with parts of these formats, which are supported, on a device that multiplies e4m3 or not.
    pub fn new(formats: impl Iterator<Item = WeightFormat> + Clone, has_fp8: bool) -> Self {
        Self::quantised(formats.clone(), has_fp8).unwrap_or_else(|| {
            let mut dtypes = formats.map(|format| match format {
                WeightFormat::Float(dtype) => dtype,
                WeightFormat::Grid(_) => Dtype::Bf16,
            });
            let first = dtypes.next().unwrap_or(Dtype::Bf16);
            Self::Floats(if dtypes.all(|dtype| dtype == first) { first } else { Dtype::Bf16 })
        })
    }

    /// Quantised rows, if all parts read the same numbers.
    fn quantised(formats: impl Iterator<Item = WeightFormat>, has_fp8: bool) -> Option<Self> {
        let (mut numbers, mut smallest_group, mut largest_chunk) = (None, None, 0);
        for format in formats {
            let WeightFormat::Grid(grid) = format else { return None };
            let chunk = quantised_matrix::chunk(&grid);
            let own = match (grid.activations, grid.bits) {
                (Activations::Int8, bits) if bits != CodeBits::E4m3 => Numbers::Int8,
                (Activations::Fp8, CodeBits::E4m3) if has_fp8 && chunk == BLOCK => Numbers::Fp8,
                _ => return None,
            };
            if *numbers.get_or_insert(own) != own {
                return None;
            }
            smallest_group = smallest_group.into_iter().chain(grid.group.map(usize::from)).min();
            largest_chunk = largest_chunk.max(chunk);
        }
        let group = smallest_group.map_or(ScaleGroup::Row, |group| {
            ScaleGroup::Columns(group.clamp(largest_chunk.max(MIN_GROUP), MAX_GROUP))
        });
        numbers.map(|numbers| Self::Quantised(numbers, group))
    }

    /// The name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floats(dtype) => dtype.name(),
            Self::Quantised(Numbers::Int8, _) => "int8",
            Self::Quantised(Numbers::Fp8, _) => "fp8",
        }
    }

    /// The activations of the kernels of quantised weights.
    pub fn activations(self) -> Activations {
        match self {
            Self::Floats(_) => Activations::Float,
            Self::Quantised(Numbers::Int8, _) => Activations::Int8,
            Self::Quantised(Numbers::Fp8, _) => Activations::Fp8,
        }
    }

    /// The type of rows of plain numbers: of those that are quantised, and that adapters read, float32.
    pub fn floats(self) -> Dtype {
        match self {
            Self::Floats(dtype) => dtype,
            Self::Quantised(..) => Dtype::F32,
        }
    }

    /// The type of tensor cores that compute attention with these results.
    pub fn arithmetic(self) -> Dtype {
        match self {
            Self::Floats(dtype) => dtype,
            Self::Quantised(..) => Dtype::Bf16,
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(self, columns: usize) -> usize {
        match self {
            Self::Floats(dtype) => columns.saturating_mul(dtype.bytes()),
            Self::Quantised(..) => quantised_bytes(columns),
        }
    }

    /// The exponent of the columns of a group, as products read it.
    pub fn group_shift(self) -> i32 {
        match self {
            Self::Quantised(_, ScaleGroup::Columns(group)) => group.ilog2().cast_signed(),
            _ => 31,
        }
    }
}

/// Bytes of a quantised row.
fn quantised_bytes(columns: usize) -> usize {
    columns.div_ceil(BLOCK).saturating_mul(BLOCK_BYTES)
}

/// The operands of a model.
#[derive(Default)]
pub(super) struct Operands {
    pub forms: Vec<OperandForm>,
    /// Whether adapters read them: then quantised rows have those of float32 beside them.
    pub has_adapters: bool,
}

impl Operands {
    /// Adds the form of a matrix.
    pub fn add(&mut self, form: OperandForm) {
        if !self.forms.contains(&form) {
            self.forms.push(form);
        }
    }

    /// Bytes of operands that have any of the forms, and the offset of quantised rows.
    pub fn bytes(&self, rows: usize, columns: usize) -> (usize, usize) {
        let floats = rows.saturating_mul(columns).saturating_mul(Dtype::F32.bytes());
        let offset = floats.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        let is_quantised = self.forms.iter().any(|form| matches!(form, OperandForm::Quantised(..)));
        let quantised = if is_quantised { rows.saturating_mul(quantised_bytes(columns)) } else { 0 };
        (offset.saturating_add(quantised), offset)
    }
}

/// Rows that a matrix is multiplied by: room for float32, then, if a matrix of the model reads them, for quantised
/// rows.
pub struct CudaOperand {
    pub(super) region: Region,
    /// The offset of quantised rows.
    pub(super) quantised: usize,
}

impl CudaOperand {
    /// The first row.
    pub(super) fn pointer(&self, memory: &CudaMemory, form: OperandForm) -> DevicePointer {
        match form {
            OperandForm::Floats(_) => self.floats(memory),
            OperandForm::Quantised(..) => {
                assert!(self.quantised < self.region.len(), "an operand of floats; this is a bug");
                self.floats(memory).offset(self.quantised)
            }
        }
    }

    /// The first row of plain numbers.
    pub(super) fn floats(&self, memory: &CudaMemory) -> DevicePointer {
        memory.pointer(&self.region)
    }
}

/// Quantised rows, as the kernels that write them read it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
pub(super) struct QuantisedRows {
    pub rows: DevicePointer,
    /// Or null.
    pub floats: DevicePointer,
    pub columns: i32,
    /// Columns of a group; 0 if a row is a group.
    pub group: i32,
}
// SAFETY: the same fields as in the kernels' type.
unsafe impl Parameter for QuantisedRows {}

impl QuantisedRows {
    /// The launch of a kernel that writes this number of rows, of which several blocks may share one.
    pub fn shape(&self, rows: usize) -> Shape {
        let parts = if self.group == 0 { 1 } else { (self.columns as usize).div_ceil(COLUMNS_OF_A_BLOCK) };
        Shape::of([rows, parts, 1], 256)
    }
}

/// Rows that a kernel writes.
pub(super) enum Rows {
    Floats(DevicePointer, Dtype),
    Quantised(QuantisedRows, Numbers),
}

impl Cuda {
    /// The rows of an operand in the form of a matrix of this many columns.
    pub(super) fn rows_for(&self, form: OperandForm, columns: usize, out: &CudaOperand) -> Rows {
        let floats = out.floats(&self.memory);
        match form {
            OperandForm::Floats(dtype) => Rows::Floats(floats, dtype),
            OperandForm::Quantised(numbers, group) => {
                let rows = QuantisedRows {
                    rows: out.pointer(&self.memory, form),
                    floats: if self.operands.has_adapters { floats } else { DevicePointer::NULL },
                    columns: columns as i32,
                    group: if let ScaleGroup::Columns(group) = group { group as i32 } else { 0 },
                };
                Rows::Quantised(rows, numbers)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::{Grid, Minimum, ScaleFormat};

    use super::*;

    fn grid(bits: CodeBits, group: Option<u16>, activations: Activations) -> WeightFormat {
        let (scales, minimum) = (ScaleFormat::F16, Minimum::Centred);
        WeightFormat::Grid(Grid { bits, group, scales, minimum, activations })
    }

    fn form(formats: &[WeightFormat]) -> OperandForm {
        OperandForm::new(formats.iter().copied(), true)
    }

    #[test]
    fn quantised_rows_need_the_same_numbers_in_all_parts() {
        let integers = grid(CodeBits::Four, Some(128), Activations::Int8);
        let fp8 = grid(CodeBits::E4m3, None, Activations::Fp8);
        assert_eq!(
            form(&[integers, integers]),
            OperandForm::Quantised(Numbers::Int8, ScaleGroup::Columns(128))
        );
        assert_eq!(form(&[fp8, fp8]), OperandForm::Quantised(Numbers::Fp8, ScaleGroup::Row));
        let bf16 = OperandForm::Floats(Dtype::Bf16);
        for other in [
            grid(CodeBits::Four, Some(128), Activations::Float),
            grid(CodeBits::E4m3, None, Activations::Int8),
            grid(CodeBits::E4m3, Some(32), Activations::Fp8),
            WeightFormat::Float(Dtype::F16),
        ] {
            assert_eq!([form(&[integers, other]), form(&[fp8, other])], [bf16; 2]);
        }
        assert_eq!(form(&[integers, fp8]), bf16);
        assert_eq!(OperandForm::new([fp8].into_iter(), false), bf16);
        let f16 = WeightFormat::Float(Dtype::F16);
        assert_eq!(form(&[f16, f16]), OperandForm::Floats(Dtype::F16));
        assert_eq!(form(&[f16, WeightFormat::Float(Dtype::F32)]), bf16);
    }

    #[test]
    fn groups_of_rows_are_as_wide_as_the_smallest_of_weights() {
        let group = |groups: &[u16]| {
            let part =
                |group: &u16| grid(CodeBits::Eight, Some(*group).filter(|g| *g > 0), Activations::Int8);
            match form(&groups.iter().map(part).collect::<Vec<_>>()) {
                OperandForm::Quantised(_, group) => group,
                OperandForm::Floats(dtype) => panic!("{dtype:?}"),
            }
        };
        assert_eq!(group(&[0]), ScaleGroup::Row);
        assert_eq!(group(&[0, 128]), ScaleGroup::Columns(128));
        assert_eq!(group(&[128, 256]), ScaleGroup::Columns(128));
        assert_eq!(group(&[32]), ScaleGroup::Columns(32));
        assert_eq!(group(&[16]), ScaleGroup::Columns(32));
        assert_eq!(group(&[4096]), ScaleGroup::Columns(1024));
        // The scale of a chunk of 64 columns is one number.
        assert_eq!(group(&[32, 128]), ScaleGroup::Columns(64));
    }

    #[test]
    fn operands_have_room_for_quantised_rows_if_a_matrix_reads_them() {
        let mut operands = Operands::default();
        operands.add(OperandForm::Floats(Dtype::Bf16));
        assert_eq!(operands.bytes(3, 70), (1024, 1024));
        operands.add(OperandForm::Quantised(Numbers::Fp8, ScaleGroup::Row));
        assert_eq!(operands.bytes(3, 70), (1024 + 3 * 160, 1024));
        assert_eq!(operands.bytes(usize::MAX, 70).0, usize::MAX);
    }
}
