//! Adapters on the CPU: rows get the updates of their adapter, which has no copy.

use std::ops::Range;
use std::sync::Arc;

use penstock_device::cpu::{Cpu, CpuAdapterLayout, CpuAdapters, CpuBuffer, CpuMatrix, CpuOperand};
use penstock_device::{
    AdapterLayout, AdapterRows, AdapterSpec, AdapterUpdates, Allocation, Compute, Load, MatrixPart, Memory,
    RowSource, Sample, StepInputs, StepRows, StepSpec, WeightSource,
};
use penstock_types::{Dtype, Epilogue, HeadShape, LowRankShape, LowRankUpdate, PackedAdapter};

const HEADS: HeadShape = HeadShape { heads: 2, kv_heads: 1, head_dim: 8 };
const TOKENS: usize = 12;
const COLUMNS: usize = 24;
const ROWS: usize = 40;
const STEP: StepSpec = StepSpec {
    tokens: TOKENS,
    sequences: 2,
    logits_rows: TOKENS,
    positions: 32,
    block_size: 16,
    heads: HEADS,
    vocabulary: 50,
};

fn value(index: usize) -> f32 {
    (index as f32 * 0.37).sin()
}

struct Table(usize, usize);

impl RowSource for Table {
    fn rows(&self) -> usize {
        self.0
    }

    fn columns(&self) -> usize {
        self.1
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.1)) {
            out.iter_mut().enumerate().for_each(|(column, out)| *out = value(row * 131 + column));
        }
    }
}

impl WeightSource for Table {}

/// An adapter of matrix 1 of this rank. Its update is `seed`.
fn adapter(seed: usize, rank: usize) -> Arc<PackedAdapter> {
    let shape = LowRankShape { rows: ROWS, columns: COLUMNS, rank, dtype: Dtype::F32 };
    let (a, b): (Vec<f32>, Vec<f32>) = (
        (0..rank * COLUMNS).map(|index| value(seed * 1000 + index)).collect(),
        (0..ROWS * rank).map(|index| value(seed * 77 + 13 + index)).collect(),
    );
    let update = |matrix| LowRankUpdate { matrix, first_row: 0, shape, scale: 0.5, offset: 0 };
    let mut packed =
        PackedAdapter::new(vec![update(1), update(4)], CpuAdapterLayout::update_bytes(&shape)).unwrap();
    CpuAdapterLayout::pack(&shape, &a, &b, packed.bytes_mut());
    Arc::new(packed)
}

struct Device {
    cpu: Cpu,
    weight: CpuMatrix,
    x: CpuOperand,
    out: CpuBuffer,
    adapters: CpuAdapters,
}

impl Device {
    fn new(count: usize) -> Self {
        let mut cpu = Cpu::new(2).unwrap();
        cpu.reserve(1 << 24).unwrap();
        let spec = AdapterSpec { adapters: count, bytes: 1 << 40, rank: 8, matrices: 5 };
        let before = cpu.memory().in_use;
        let announced = cpu.bytes(Allocation::Adapters { adapters: &spec, step: &STEP });
        let adapters = cpu.allocate_adapters(&spec, &STEP).unwrap();
        assert_eq!(cpu.memory().in_use - before, announced, "as announced");
        let part = |source| MatrixPart { source, format: Dtype::F32.into() };
        let weight = cpu.load_matrix(&[part(&Table(ROWS, COLUMNS))]).unwrap();
        // The rows of x are those of a table, after a norm with weights of 1.
        let table = cpu.load_matrix(&[part(&Table(50, COLUMNS))]).unwrap();
        let (mut rows, norm) =
            (cpu.allocate(TOKENS * COLUMNS).unwrap(), cpu.load_vector(&[1.0; COLUMNS]).unwrap());
        let slots = cpu.allocate_slots(&STEP).unwrap();
        cpu.embed(&inputs(&[]), &slots, &table, &mut rows).unwrap();
        let mut x = cpu.allocate_operand(TOKENS, COLUMNS).unwrap();
        cpu.rms_norm_for(&weight, TOKENS, &rows, &norm, 1e-6, &mut x).unwrap();
        let out = cpu.allocate(TOKENS * ROWS).unwrap();
        Self { cpu, weight, x, out, adapters }
    }

    fn load(&mut self, number: u32, adapter: &Arc<PackedAdapter>) {
        self.cpu.load_adapter(&mut self.adapters, number, adapter).unwrap();
    }

    fn unload(&mut self, number: u32) {
        self.cpu.unload_adapter(&mut self.adapters, number).unwrap();
    }

    /// The product with the updates of matrix 1.
    fn product(&mut self, rows: &[(Range<usize>, u32)]) -> Vec<f32> {
        let Self { cpu, weight, x, out, adapters } = self;
        let inputs = inputs(rows);
        cpu.linear(0..TOKENS, x, weight, Epilogue::Store, out).unwrap();
        cpu.add_adapters(updates(&inputs, StepRows::All, 1, adapters), x, weight, out).unwrap();
        let mut apart = vec![0.0; TOKENS * ROWS];
        cpu.download(out, 0, &mut apart).unwrap();
        let updates = updates(&inputs, StepRows::All, 1, adapters);
        cpu.linear_with_adapters(TOKENS, x, weight, Epilogue::Store, updates, out).unwrap();
        let mut together = vec![0.0; TOKENS * ROWS];
        cpu.download(out, 0, &mut together).unwrap();
        assert_eq!(together, apart);
        together
    }
}

/// The updates of a matrix.
fn updates<'a>(
    step: &'a StepInputs,
    rows: StepRows,
    matrix: u32,
    adapters: &'a mut CpuAdapters,
) -> AdapterUpdates<'a, &'a StepInputs, CpuAdapters> {
    AdapterUpdates { step, rows, matrix, adapters }
}

fn inputs(rows: &[(Range<usize>, u32)]) -> StepInputs {
    let adapters = rows.iter().map(|(rows, adapter)| AdapterRows { rows: rows.clone(), adapter: *adapter });
    StepInputs {
        tokens: (0..TOKENS as u32).collect(),
        output_rows: vec![3, 5, 11],
        adapters: adapters.collect(),
        ..StepInputs::default()
    }
}

#[test]
fn rows_have_the_updates_of_their_adapter_and_no_others() {
    let mut device = Device::new(3);
    for number in 0..3 {
        device.load(number, &adapter(number as usize, 3 + number as usize));
    }
    let plain = device.product(&[]);
    let mixed = device.product(&[(1..3, 2), (4..9, 0), (9..10, 1)]);
    for (rows, number) in [(1..3, 2), (4..9, 0), (9..10, 1)] {
        let alone = device.product(&[(0..TOKENS, number)]);
        let range = rows.start * ROWS..rows.end * ROWS;
        assert_eq!(mixed[range.clone()], alone[range.clone()]);
        assert_ne!(mixed[range.clone()], plain[range]);
    }
    for row in [0, 3, 10, 11] {
        assert_eq!(mixed[row * ROWS..][..ROWS], plain[row * ROWS..][..ROWS]);
    }
}

#[test]
fn loaded_adapter_is_the_one_of_the_host_until_it_is_unloaded() {
    let mut device = Device::new(2);
    let adapters = [adapter(1, 2), adapter(2, 3)];
    let in_use = device.cpu.memory().in_use;
    let mut outputs = Vec::new();
    for adapter in &adapters {
        device.load(1, adapter);
        assert_eq!(Arc::strong_count(adapter), 2);
        outputs.push(device.product(&[(0..TOKENS, 1)]));
        device.unload(1);
        assert_eq!(Arc::strong_count(adapter), 1);
    }
    assert_eq!(device.cpu.memory().in_use, in_use, "no copy");
    assert_ne!(outputs[0], outputs[1]);
    device.load(0, &adapters[0]);
    assert_eq!(device.product(&[(0..TOKENS, 0)]), outputs[0]);
}

#[test]
fn output_rows_have_the_updates_of_their_rows() {
    let mut device = Device::new(2);
    device.load(0, &adapter(1, 2));
    device.load(1, &adapter(2, 5));
    let rows = [(0..4, 1), (4..8, 0)];
    let Device { cpu, weight, x, out, adapters } = &mut device;
    // Output rows 0, 1 and 2 are rows 3, 5 and 11: the first has adapter 1, the second adapter 0, the third none.
    cpu.linear(0..3, x, weight, Epilogue::Store, out).unwrap();
    let inputs = inputs(&rows);
    cpu.add_adapters(updates(&inputs, StepRows::Outputs, 1, adapters), x, weight, out).unwrap();
    let mut values = vec![0.0; 3 * ROWS];
    cpu.download(out, 0, &mut values).unwrap();
    let expected = device.product(&[(0..1, 1), (1..2, 0)]);
    assert_eq!(values, expected[..3 * ROWS]);
}

#[test]
fn other_matrices_are_not_updated() {
    let mut device = Device::new(1);
    device.load(0, &adapter(1, 2));
    let plain = device.product(&[]);
    let Device { cpu, weight, x, out, adapters } = &mut device;
    cpu.linear(0..TOKENS, x, weight, Epilogue::Store, out).unwrap();
    for matrix in [0, 2, 3, 5] {
        let inputs = inputs(&[(0..TOKENS, 0)]);
        cpu.add_adapters(updates(&inputs, StepRows::All, matrix, adapters), x, weight, out).unwrap();
    }
    let mut values = vec![0.0; TOKENS * ROWS];
    cpu.download(out, 0, &mut values).unwrap();
    assert_eq!(values, plain);
}
