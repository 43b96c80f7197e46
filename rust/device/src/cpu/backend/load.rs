//! Weights, rope tables and adapters of the CPU: packed into the arena, or used where the host has them.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::cast_slice_mut;
use bytes::Bytes;
use penstock_kernels::{MatrixLayout, OperandLayout, PACKED_LAYOUT, PANEL_ROWS, is_supported};
use penstock_types::{FieldError, HeadShape, KvDtype, PackedAdapter, WeightFormat};

use super::{hidden_len, rotation_width};
use crate::bfc::Placement;
use crate::cpu::buffers::{Weights, lend, lend_some};
use crate::cpu::matrices::{layout, pack_part};
use crate::cpu::{Cpu, CpuAdapterLayout, CpuAdapters, CpuBuffer, CpuMatrix, CpuRope, rope};
use crate::error::DeviceError;
use crate::seam::{
    AdapterSpec, CacheSpec, Load, MatrixPart, PackedLayout, PlannedMatrix, RowSource, StepSpec,
};

impl Load for Cpu {
    type Matrix = CpuMatrix;
    type Vector = CpuBuffer;
    type Rope = CpuRope;
    type Adapters = CpuAdapters;
    type AdapterLayout = CpuAdapterLayout;

    fn check_cache(&self, _: HeadShape, _: KvDtype) -> Result<(), FieldError> {
        Ok(())
    }

    fn supports(&self, format: WeightFormat, columns: usize) -> bool {
        match format {
            WeightFormat::Float(_) => true,
            WeightFormat::Grid(grid) => {
                is_supported(&grid) && (!format.reads_codes() || columns <= OperandLayout::MOST_COLUMNS)
            }
        }
    }

    fn activations(&self, format: WeightFormat) -> &'static str {
        if format.reads_codes() { "int8" } else { "float32" }
    }

    /// The kernels are part of the program.
    fn prepare(&mut self, _: &[PlannedMatrix], _: &CacheSpec, _: bool) -> Result<(), DeviceError> {
        Ok(())
    }

    fn packed_layout(&self) -> PackedLayout {
        PackedLayout { name: PACKED_LAYOUT, rows: PANEL_ROWS }
    }

    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64 {
        MatrixLayout { rows, columns, format }.bytes() as u64
    }

    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]) {
        pack_part(&self.pool, part, out);
    }

    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<CpuMatrix, DeviceError> {
        let columns = parts.first().map_or(0, |part| part.source.columns());
        let matrix = self.arena_matrix(columns, parts.iter().map(layout).collect())?;
        let [mut rest] = lend_some(&mut self.arena, [matrix.weights.region()]);
        for (part, layout) in parts.iter().zip(&matrix.parts) {
            let (bytes, others) = rest.split_at_mut(layout.bytes());
            rest = others;
            pack_part(&self.pool, *part, bytes);
        }
        Ok(matrix)
    }

    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<CpuMatrix, DeviceError> {
        let layout =
            |(rows, format): &(usize, WeightFormat)| MatrixLayout { rows: *rows, columns, format: *format };
        let parts = parts.iter().map(layout).collect();
        match self.copies_mapped() {
            true => self.copied_matrix(columns, parts, &bytes),
            false => Ok(self.matrix(columns, parts, Weights::Mapped(bytes))),
        }
    }

    /// Pages of a file cannot be placed.
    fn copies_mapped(&self) -> bool {
        self.numa_memory.is_set()
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CpuBuffer, DeviceError> {
        let region = self.region(values.len(), size_of::<f32>(), Placement::Low, "weights")?;
        let [bytes] = lend(&mut self.arena, [&region]);
        cast_slice_mut(bytes).copy_from_slice(values);
        Ok(CpuBuffer(region))
    }

    fn load_rope(&mut self, table: &dyn RowSource, step: &StepSpec) -> Result<CpuRope, DeviceError> {
        let (positions, width) = (table.rows(), rotation_width(step));
        assert_eq!(table.columns(), width, "values of a rotation; this is a bug");
        let mut rotations = |rows: usize| self.workspace(rows.saturating_mul(width), "workspace");
        let rope = CpuRope { table: rotations(positions)?, step: rotations(step.tokens)?, positions, width };
        let [bytes] = lend(&mut self.arena, [&rope.table]);
        rope::fill(&self.pool, table, &mut cast_slice_mut(bytes)[..positions * width]);
        Ok(rope)
    }

    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        step: &StepSpec,
    ) -> Result<CpuAdapters, DeviceError> {
        let hidden = self.workspace(hidden_len(adapters, step), "workspace")?;
        Ok(CpuAdapters::new(hidden, adapters.adapters))
    }

    fn load_adapter(
        &mut self,
        adapters: &mut CpuAdapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        adapters.load(number as usize, adapter);
        Ok(())
    }

    fn unload_adapter(&mut self, adapters: &mut CpuAdapters, number: u32) -> Result<(), DeviceError> {
        adapters.unload(number as usize);
        Ok(())
    }
}
