//! Operands: the rows that a matrix is multiplied by, `cuda/quantised.cuh` if they are integers.

use bytemuck::NoUninit;
use penstock_cuda::{DevicePointer, Parameter};
use penstock_types::{Activations, CodeBits, Dtype, WeightFormat};

use super::memory::Memory;
use super::queue::Shape;
use super::{Cuda, CudaMatrix, codes};
use crate::arena::Region;

/// Columns of a block of integers, and its bytes.
const BLOCK: usize = 64;
const BLOCK_BYTES: usize = 80;
/// Columns of the smallest and of the largest span.
const MIN_SPAN: usize = 32;
const MAX_SPAN: usize = 1024;
/// Columns that a block of threads quantises at a time.
const COLUMNS_OF_A_BLOCK: usize = 1024;
/// Alignment of the integers of an operand.
const ALIGNMENT: usize = 256;

/// The form of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperandForm {
    Floats(Dtype),
    /// 8-bit integers, with a scale for each span of columns; `None` if a row is a span.
    Integers {
        span: Option<usize>,
    },
}

impl OperandForm {
    /// The form for a matrix with parts of these formats, which are supported.
    pub fn new(formats: impl Iterator<Item = WeightFormat> + Clone) -> Self {
        Self::integers(formats.clone()).unwrap_or_else(|| {
            let mut dtypes = formats.map(|format| match format {
                WeightFormat::Float(dtype) => dtype,
                WeightFormat::Grid(_) => Dtype::Bf16,
            });
            let first = dtypes.next().unwrap_or(Dtype::Bf16);
            Self::Floats(if dtypes.all(|dtype| dtype == first) { first } else { Dtype::Bf16 })
        })
    }

    /// Integers, if all parts have codes of integers that are multiplied by integers.
    fn integers(formats: impl Iterator<Item = WeightFormat>) -> Option<Self> {
        let (mut smallest_group, mut largest_chunk) = (None, None);
        for format in formats {
            let WeightFormat::Grid(grid) = format else { return None };
            if grid.activations != Activations::Int8 || grid.bits == CodeBits::E4m3 {
                return None;
            }
            let group = grid.group.map(usize::from);
            smallest_group = smallest_group.into_iter().chain(group).min();
            largest_chunk = largest_chunk.max(Some(codes::chunk(&grid)));
        }
        let smallest_span = largest_chunk?.max(MIN_SPAN);
        Some(Self::Integers { span: smallest_group.map(|group| group.clamp(smallest_span, MAX_SPAN)) })
    }

    /// The activations of the kernels of codes.
    pub fn activations(self) -> Activations {
        match self {
            Self::Floats(_) => Activations::Float,
            Self::Integers { .. } => Activations::Int8,
        }
    }

    /// The type of rows of plain numbers: with integers, of those that are quantised, and that adapters read.
    pub fn floats(self) -> Dtype {
        match self {
            Self::Floats(dtype) => dtype,
            Self::Integers { .. } => Dtype::F32,
        }
    }

    /// The type of tensor cores that compute attention with these results.
    pub fn arithmetic(self) -> Dtype {
        match self {
            Self::Floats(dtype) => dtype,
            Self::Integers { .. } => Dtype::Bf16,
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(self, columns: usize) -> usize {
        match self {
            Self::Floats(dtype) => columns.saturating_mul(dtype.bytes()),
            Self::Integers { .. } => integer_bytes(columns),
        }
    }

    /// The exponent of a span of integers, as products read it.
    pub fn span_shift(self) -> i32 {
        match self {
            Self::Integers { span: Some(span) } => span.ilog2().cast_signed(),
            _ => 31,
        }
    }
}

/// Bytes of a row of integers.
fn integer_bytes(columns: usize) -> usize {
    columns.div_ceil(BLOCK).saturating_mul(BLOCK_BYTES)
}

/// The operands of a model.
#[derive(Default)]
pub(super) struct Operands {
    pub forms: Vec<OperandForm>,
    /// Whether adapters read them: then integers have rows of float32 beside them.
    pub has_adapters: bool,
}

impl Operands {
    /// Adds the form of a matrix.
    pub fn add(&mut self, form: OperandForm) {
        if !self.forms.contains(&form) {
            self.forms.push(form);
        }
    }

    /// Bytes of operands that have any of the forms, and the offset of integers.
    pub fn bytes(&self, rows: usize, columns: usize) -> (usize, usize) {
        let floats = rows.saturating_mul(columns).saturating_mul(Dtype::F32.bytes());
        let offset = floats.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        let has_integers = self.forms.iter().any(|form| matches!(form, OperandForm::Integers { .. }));
        let integers = if has_integers { rows.saturating_mul(integer_bytes(columns)) } else { 0 };
        (offset.saturating_add(integers), offset)
    }
}

/// Rows that a matrix is multiplied by: room for float32, then, if a matrix of the model has them, for integers.
pub struct CudaOperand {
    pub(super) region: Region,
    /// The offset of integers.
    pub(super) integers: usize,
}

impl CudaOperand {
    /// The first row.
    pub(super) fn pointer(&self, memory: &Memory, form: OperandForm) -> DevicePointer {
        match form {
            OperandForm::Floats(_) => self.floats(memory),
            OperandForm::Integers { .. } => {
                assert!(self.integers < self.region.len(), "an operand without integers; this is a bug");
                self.floats(memory).offset(self.integers)
            }
        }
    }

    /// The first row of plain numbers.
    pub(super) fn floats(&self, memory: &Memory) -> DevicePointer {
        memory.pointer(&self.region)
    }
}

/// Rows of integers, as the kernels that write them read it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
pub(super) struct QuantisedRows {
    pub rows: DevicePointer,
    /// Or null.
    pub floats: DevicePointer,
    pub columns: i32,
    /// Columns of a span; 0 if a row is a span.
    pub span: i32,
}
// SAFETY: the same fields as in the kernels' type.
unsafe impl Parameter for QuantisedRows {}

impl QuantisedRows {
    /// The launch of a kernel that writes this number of rows, of which several blocks may share one.
    pub fn shape(&self, rows: usize) -> Shape {
        let parts = if self.span == 0 { 1 } else { (self.columns as usize).div_ceil(COLUMNS_OF_A_BLOCK) };
        Shape::of([rows, parts, 1], 256)
    }
}

/// Rows that a kernel writes.
pub(super) enum Rows {
    Floats(DevicePointer, Dtype),
    Integers(QuantisedRows),
}

impl Cuda {
    /// The rows of an operand for a matrix.
    pub(super) fn rows_for(&self, reader: &CudaMatrix, out: &CudaOperand) -> Rows {
        let (form, floats) = (reader.operand, out.floats(&self.memory));
        match form {
            OperandForm::Floats(dtype) => Rows::Floats(floats, dtype),
            OperandForm::Integers { span } => Rows::Integers(QuantisedRows {
                rows: out.pointer(&self.memory, form),
                floats: if self.operands.has_adapters { floats } else { DevicePointer::NULL },
                columns: reader.columns as i32,
                span: span.unwrap_or(0) as i32,
            }),
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
        OperandForm::new(formats.iter().copied())
    }

    #[test]
    fn integers_need_codes_of_integers_in_all_parts() {
        let integers = grid(CodeBits::Four, Some(128), Activations::Int8);
        assert_eq!(form(&[integers, integers]), OperandForm::Integers { span: Some(128) });
        let bf16 = OperandForm::Floats(Dtype::Bf16);
        for other in [
            grid(CodeBits::Four, Some(128), Activations::Float),
            grid(CodeBits::E4m3, None, Activations::Int8),
            WeightFormat::Float(Dtype::F16),
        ] {
            assert_eq!(form(&[integers, other]), bf16);
        }
        let f16 = WeightFormat::Float(Dtype::F16);
        assert_eq!(form(&[f16, f16]), OperandForm::Floats(Dtype::F16));
        assert_eq!(form(&[f16, WeightFormat::Float(Dtype::F32)]), bf16);
    }

    #[test]
    fn spans_are_as_wide_as_the_smallest_group() {
        let span = |groups: &[u16]| {
            let part =
                |group: &u16| grid(CodeBits::Eight, Some(*group).filter(|g| *g > 0), Activations::Int8);
            match form(&groups.iter().map(part).collect::<Vec<_>>()) {
                OperandForm::Integers { span } => span,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(span(&[0]), None);
        assert_eq!(span(&[0, 128]), Some(128));
        assert_eq!(span(&[128, 256]), Some(128));
        assert_eq!(span(&[32]), Some(32));
        assert_eq!(span(&[16]), Some(32));
        assert_eq!(span(&[4096]), Some(1024));
        // The scale of a chunk of 64 columns is one number.
        assert_eq!(span(&[32, 128]), Some(64));
    }

    #[test]
    fn operands_have_room_for_integers_if_a_matrix_has_them() {
        let mut operands = Operands::default();
        operands.add(OperandForm::Floats(Dtype::Bf16));
        assert_eq!(operands.bytes(3, 70), (1024, 1024));
        operands.add(OperandForm::Integers { span: None });
        assert_eq!(operands.bytes(3, 70), (1024 + 3 * 160, 1024));
        assert_eq!(operands.bytes(usize::MAX, 70).0, usize::MAX);
    }
}
