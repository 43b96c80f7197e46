//! The inputs of a step on the device: one copy of all arrays, from a page-locked buffer to a region.

use std::mem::size_of;

use bytemuck::{NoUninit, cast_slice};
use penstock_cuda::DevicePointer;
use penstock_types::{Dtype, HeadShape};

use super::Cuda;
use super::attention::{WorkItem, WorkItems, partial_rows};
use super::graphs::StepShape;
use super::low_rank::{Tile, Tiles, divide_rows};
use super::matrix::read_as;
use super::upload::Staging;
use crate::arena::Region;
use crate::error::DeviceError;
use crate::seam::RowSource;
use crate::seam::{StepInputs, StepRows, StepSpec};

/// Page-locked buffers. A step may be uploaded twice, two steps are in flight, and one is being launched.
const BUFFERS: usize = 6;
/// Alignment of an array.
const ALIGNMENT: usize = 16;

/// A rope table, and the inputs of the current step.
pub struct CudaRope {
    pub(super) table: Region,
    pub(super) positions: usize,
    /// Values of a row of the table.
    pub(super) width: usize,
    inputs: Region,
    buffers: Vec<Staging>,
    next: usize,
    /// Reused in every step.
    work_items: WorkItems,
    adapter_tiles: Vec<Tile>,
    heads: HeadShape,
}

/// The inputs of a step, by their addresses.
#[derive(Clone, Copy)]
pub struct CudaStep<'a> {
    pub(super) inputs: &'a StepInputs,
    pub(super) tokens: DevicePointer,
    pub(super) positions: DevicePointer,
    pub(super) write_blocks: DevicePointer,
    pub(super) write_offsets: DevicePointer,
    pub(super) output_rows: DevicePointer,
    pub(super) extra_rotations: DevicePointer,
    /// Null if there are none.
    pub(super) query_scales: DevicePointer,
    /// The rows with adapters, of all rows and of the output rows.
    pub(super) adapters: [Tiles; 2],
    pub(super) blocks: DevicePointer,
    pub(super) decode: WorkItemList,
    pub(super) combine: WorkItemList,
    pub(super) prefill: WorkItemList,
    /// The most rows of a work item of prefill.
    pub(super) prefill_rows: usize,
}

/// Work items of attention on the device.
#[derive(Clone, Copy)]
pub(super) struct WorkItemList {
    pub work_items: DevicePointer,
    pub count: usize,
}

/// Bytes of the page-locked buffers of inputs.
pub(super) fn input_buffer_bytes(spec: &StepSpec) -> usize {
    input_bytes(spec).saturating_mul(BUFFERS)
}

/// Bytes of the inputs of the largest step.
pub(super) fn input_bytes(spec: &StepSpec) -> usize {
    let rotation = rotation_width(spec) * size_of::<f32>();
    let row = 6 * size_of::<u32>() + 2 * size_of::<Tile>() + rotation;
    let work_items = WorkItems::most(spec.tokens, spec.sequences, spec.heads, partial_rows(spec));
    let arrays = [
        (spec.tokens, row),
        (spec.most_blocks(), size_of::<u32>()),
        (work_items, size_of::<WorkItem>()),
        (16, ALIGNMENT),
    ];
    arrays.into_iter().fold(0, |sum: usize, (count, bytes)| sum.saturating_add(count.saturating_mul(bytes)))
}

/// Values of a row of the rope table.
pub(super) fn rotation_width(spec: &StepSpec) -> usize {
    spec.heads.head_dim / 2 * 2
}

/// Writes arrays one after the other.
struct Arrays<'a> {
    out: &'a mut [u8],
    end: usize,
    target: DevicePointer,
}

impl Arrays<'_> {
    /// Appends an array, and returns its address on the device.
    fn push<T: NoUninit>(&mut self, values: &[T]) -> DevicePointer {
        let (start, bytes) = (self.end.next_multiple_of(ALIGNMENT), cast_slice::<T, u8>(values));
        self.end = start + bytes.len();
        self.out[start..self.end].copy_from_slice(bytes);
        self.target.offset(start)
    }

    /// The same, or null if it is empty.
    fn push_some<T: NoUninit>(&mut self, values: &[T]) -> DevicePointer {
        if values.is_empty() { DevicePointer::NULL } else { self.push(values) }
    }

    fn push_work_items(&mut self, work_items: &[WorkItem]) -> WorkItemList {
        WorkItemList { work_items: self.push(work_items), count: work_items.len() }
    }
}

impl CudaRope {
    /// Loads a table, and makes room for the inputs of a step.
    pub(super) fn new(cuda: &mut Cuda, source: &dyn RowSource, spec: &StepSpec) -> Result<Self, DeviceError> {
        let (positions, width) = (source.rows(), rotation_width(spec));
        assert_eq!(source.columns(), width, "values of a rotation; this is a bug");
        let row_bytes = width * size_of::<f32>();
        let table = cuda.memory.allocate_workspace(positions.saturating_mul(row_bytes), "workspace")?;
        let target = cuda.memory.pointer(&table);
        cuda.uploader.upload(&cuda.queue, target, (positions, row_bytes), 1, &|rows, out| {
            read_as(source, rows, Dtype::F32, out);
        })?;
        let bytes = input_bytes(spec);
        let buffers = (0..BUFFERS).map(|_| Staging::new(&cuda.pinned, "a buffer of inputs", bytes));
        Ok(Self {
            table,
            positions,
            width,
            inputs: cuda.memory.allocate_workspace(bytes, "workspace")?,
            buffers: buffers.collect::<Result<_, _>>()?,
            next: 0,
            work_items: WorkItems::default(),
            adapter_tiles: Vec::new(),
            heads: spec.heads,
        })
    }
}

impl Cuda {
    /// Copies valid inputs to the device. Kernels read these arrays before they wait for the kernel before them: only
    /// copies in this stream may write them.
    pub(super) fn upload_inputs<'a>(
        &mut self,
        inputs: &'a StepInputs,
        rope: &mut CudaRope,
    ) -> Result<CudaStep<'a>, DeviceError> {
        let target = self.memory.pointer(&rope.inputs);
        let (most_rows, prefill_rows) = (self.most_partial_rows, self.attention.prefill_rows());
        rope.work_items.divide(&inputs.sequences, rope.heads, most_rows, prefill_rows);
        let buffer = &mut rope.buffers[rope.next];
        rope.next = (rope.next + 1) % BUFFERS;
        // A capture of the step's embeddings may be open, in which no event may be queried.
        self.queue.submit()?;
        buffer.wait()?;
        let mut arrays = Arrays { out: buffer.memory.bytes_mut(), end: 0, target };
        let step = CudaStep {
            inputs,
            tokens: arrays.push(&inputs.tokens),
            positions: arrays.push(&inputs.positions),
            write_blocks: arrays.push(&inputs.write_blocks),
            write_offsets: arrays.push(&inputs.write_offsets),
            output_rows: arrays.push(&inputs.output_rows),
            extra_rotations: arrays.push_some(&inputs.extra_rotations),
            query_scales: arrays.push_some(&inputs.query_scales),
            adapters: [StepRows::All, StepRows::Outputs].map(|rows| {
                divide_rows(inputs, rows, &mut rope.adapter_tiles);
                Tiles { tiles: arrays.push(&rope.adapter_tiles), count: rope.adapter_tiles.len() }
            }),
            decode: arrays.push_work_items(&rope.work_items.decode),
            combine: arrays.push_work_items(&rope.work_items.combine),
            prefill: arrays.push_work_items(&rope.work_items.prefill),
            prefill_rows,
            // Last, because their number does not depend on the shape of the step.
            blocks: arrays.push(&inputs.blocks),
        };
        let bytes = arrays.end;
        buffer.upload(&self.queue, bytes, target)?;
        self.queue.begin_step(step.shape())?;
        Ok(step)
    }
}

impl CudaStep<'_> {
    /// The shape of a step that only decodes. Others seldom have the same shape again, and take longer than their
    /// launches.
    fn shape(&self) -> Option<StepShape> {
        let inputs = self.inputs;
        (self.prefill.count == 0).then_some(StepShape {
            rows: inputs.tokens.len(),
            outputs: inputs.output_rows.len(),
            work_items: [self.decode.count, self.combine.count],
            adapter_tiles: self.adapters.map(|tiles| tiles.count),
        })
    }
}
