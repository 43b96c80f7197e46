//! The CPU backend: sizes announced and taken, blocks that are saved and loaded, rotations, and invalid steps.

use std::ops::Range;

use penstock_device::cpu::{Cpu, CpuBuffer, CpuCache};
use penstock_device::{
    AdapterRows, Allocation, CacheSpec, Compute, DeviceError, EXTRA, FOLLOWS, LayerAttention, LayerHeads,
    Load, MatrixPart, Memory, RowSource, Sample, StepInputs, StepSpec, WeightSource,
};
use penstock_types::{
    AttentionParams, AttentionRow, BlockCopy, BlockId, Dtype, Epilogue, HeadShape, HostBlockId, KvDtype,
};

const HEADS: HeadShape = HeadShape { heads: 4, kv_heads: 2, head_dim: 8 };
const LAYERS: usize = 3;
const BLOCK_SIZE: usize = 16;

/// Rows of numbers that differ between tokens and between columns.
struct Table {
    rows: usize,
    columns: usize,
}

impl RowSource for Table {
    fn rows(&self) -> usize {
        self.rows
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.columns)) {
            for (column, value) in out.iter_mut().enumerate() {
                *value = ((row * 31 + column * 7) as f32).sin();
            }
        }
    }
}

impl WeightSource for Table {}

/// A square matrix: a product copies its rows.
struct Identity(usize);

impl RowSource for Identity {
    fn rows(&self) -> usize {
        self.0
    }

    fn columns(&self) -> usize {
        self.0
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        out.fill(0.0);
        rows.zip(out.chunks_exact_mut(self.0)).for_each(|(row, out)| out[row] = 1.0);
    }
}

impl WeightSource for Identity {}

/// A whole matrix.
fn part(source: &dyn WeightSource, dtype: Dtype) -> MatrixPart<'_> {
    MatrixPart { source, format: dtype.into() }
}

fn cache_spec(blocks: usize, host_blocks: usize) -> CacheSpec {
    let dtype = KvDtype::F32;
    CacheSpec { layers: LAYERS, blocks, host_blocks, block_size: BLOCK_SIZE, heads: HEADS, dtype }
}

const STEP: StepSpec = StepSpec {
    tokens: 40,
    sequences: 3,
    logits_rows: 5,
    positions: 100,
    block_size: BLOCK_SIZE,
    heads: HEADS,
    vocabulary: 100,
};

#[test]
fn announced_sizes_are_the_sizes_taken() {
    let mut cpu = Cpu::new(2).unwrap();
    let table = Table { rows: 33, columns: 10 };
    let spec = cache_spec(5, 2);
    let blocks = |count| cpu.bytes(Allocation::Blocks { cache: &spec, count });
    let announced = [
        cpu.bytes(Allocation::Matrix { columns: 10, parts: &[(33, Dtype::Bf16.into())] }),
        cpu.bytes(Allocation::Operand { rows: 3, columns: 10 }),
        cpu.bytes(Allocation::Floats(7)),
        cpu.bytes(Allocation::Floats(1001)),
        cpu.bytes(Allocation::Rope { positions: 100, step: &STEP }),
        cpu.bytes(Allocation::Scratch(&STEP)),
        cpu.bytes(Allocation::Slots(&STEP)),
        blocks(5) + blocks(2),
    ];
    cpu.reserve(announced.iter().sum()).unwrap();
    let mut taken = Vec::new();
    let mut before = 0;
    let mut note = |cpu: &Cpu| {
        taken.push(cpu.memory().in_use - before);
        before = cpu.memory().in_use;
    };
    let _matrix = cpu.load_matrix(&[part(&table, Dtype::Bf16)]).unwrap();
    note(&cpu);
    let _operand = cpu.allocate_operand(3, 10).unwrap();
    note(&cpu);
    let _vector = cpu.load_vector(&[1.0; 7]).unwrap();
    note(&cpu);
    let _buffer = cpu.allocate(1001).unwrap();
    note(&cpu);
    let _rope = cpu.load_rope(&rope(100), &STEP).unwrap();
    note(&cpu);
    let _scratch = cpu.allocate_scratch(&STEP).unwrap();
    note(&cpu);
    let _slots = cpu.allocate_slots(&STEP).unwrap();
    note(&cpu);
    let _cache = cpu.allocate_cache(&spec).unwrap();
    note(&cpu);
    assert_eq!(taken, announced);
    // Nothing is left: one more value is refused, and the error says what holds the memory.
    let refusal = cpu.allocate(1).err().unwrap();
    assert!(matches!(refusal, DeviceError::Exhausted(_)), "{refusal}");
    let message = refusal.to_string();
    assert!(message.starts_with("workspace needs 4 bytes; 0 of "), "{message}");
    assert!(message.contains("in use: KV cache "), "{message}");
}

#[test]
fn more_memory_than_the_machine_has_is_an_error() {
    let error = Cpu::new(1).unwrap().reserve(1 << 60).unwrap_err();
    assert!(matches!(error, DeviceError::OutOfMemory { bytes, .. } if bytes == 1 << 60), "{error}");
    let mut cpu = Cpu::new(1).unwrap();
    cpu.reserve(1 << 16).unwrap();
    assert!(matches!(cpu.allocate(usize::MAX), Err(DeviceError::Exhausted(_))));
}

#[test]
fn step_arrays_larger_than_memory_are_an_error() {
    let spec = StepSpec { tokens: usize::MAX, ..STEP };
    assert_eq!(StepInputs::bytes(&spec), u64::MAX);
    assert!(matches!(StepInputs::with_room(&spec), Err(DeviceError::OutOfMemory { .. })));
    let inputs = StepInputs::with_room(&STEP).unwrap();
    let words = [&inputs.tokens, &inputs.positions, &inputs.write_blocks, &inputs.write_offsets];
    let words = words.into_iter().chain([&inputs.blocks, &inputs.output_rows]);
    let bytes =
        4 * words.map(Vec::capacity).sum::<usize>() + size_of::<AttentionRow>() * inputs.sequences.capacity();
    assert_eq!(StepInputs::bytes(&STEP), bytes as u64);
}

/// The heads of a layer, without norms.
fn heads(layer: usize) -> LayerHeads<'static, CpuBuffer> {
    LayerHeads { shape: HEADS, norms: None, layer }
}

/// A rope table with different values everywhere.
fn rope(positions: usize) -> Table {
    Table { rows: positions, columns: HEADS.head_dim }
}

/// A sequence of `tokens` in `blocks`.
fn step(tokens: Range<u32>, blocks: &[u32]) -> StepInputs {
    let count = tokens.len();
    StepInputs {
        tokens: tokens.collect(),
        write_blocks: (0..count).map(|row| blocks[row / BLOCK_SIZE]).collect(),
        write_offsets: (0..count).map(|row| (row % BLOCK_SIZE) as u32).collect(),
        positions: (0..count as u32).collect(),
        extra_rotations: Vec::new(),
        query_scales: Vec::new(),
        sequences: vec![AttentionRow {
            first_query: 0,
            num_queries: count,
            start: 0,
            blocks: 0..blocks.len(),
        }],
        blocks: blocks.to_vec(),
        output_rows: Vec::new(),
        adapters: Vec::new(),
    }
}

#[test]
fn saved_blocks_are_the_same_in_every_layer_after_loading() {
    let mut cpu = Cpu::new(2).unwrap();
    cpu.reserve(1 << 24).unwrap();
    let width = HEADS.qkv_width();
    let table = cpu.load_matrix(&[part(&Table { rows: 100, columns: width }, Dtype::F32)]).unwrap();
    let mut qkv = cpu.allocate(40 * width).unwrap();
    let query = HEADS.query_width();
    let identity = cpu.load_matrix(&[part(&Identity(query), Dtype::F32)]).unwrap();
    let (mut attended, mut out) =
        (cpu.allocate_operand(40, query).unwrap(), cpu.allocate(40 * query).unwrap());
    let mut scratch = cpu.allocate_scratch(&STEP).unwrap();
    let slots = cpu.allocate_slots(&STEP).unwrap();
    let mut rope = cpu.load_rope(&rope(40), &STEP).unwrap();
    let mut cache = cpu.allocate_cache(&cache_spec(4, 3)).unwrap();
    let params = AttentionParams { scale: 0.3, window: None, softcap: None };
    let mut write = |cpu: &mut Cpu, cache: &mut CpuCache, inputs: &StepInputs| {
        for layer in 0..LAYERS {
            let mut inputs = inputs.clone();
            inputs.tokens.iter_mut().for_each(|token| *token += layer as u32);
            let step = cpu.upload(&inputs, &mut rope, &slots, cache, None).unwrap();
            cpu.embed(step, &slots, &table, &mut qkv).unwrap();
            cpu.rope_write_kv(step, &rope, heads(layer), &mut qkv, cache).unwrap();
        }
    };
    let queries = cpu.load_matrix(&[part(&Table { rows: 100, columns: width }, Dtype::F32)]).unwrap();
    let mut asked = cpu.allocate(40 * width).unwrap();
    let mut attend = |cpu: &mut Cpu, cache: &_, inputs: &StepInputs| -> Vec<Vec<f32>> {
        cpu.embed(inputs, &slots, &queries, &mut asked).unwrap();
        let layers = 0..LAYERS;
        let attended = layers.map(|layer| {
            let mut values = vec![0.0; inputs.tokens.len() * HEADS.query_width()];
            let attention = LayerAttention { shape: HEADS, params, cache, layer };
            cpu.attention(&identity, inputs, attention, &mut asked, &mut scratch, &mut attended).unwrap();
            let rows = 0..inputs.tokens.len();
            cpu.linear(rows, &attended, &identity, Epilogue::Store, &mut out).unwrap();
            cpu.download(&out, 0, &mut values).unwrap();
            values
        });
        attended.collect()
    };

    // Two blocks, the second partly filled.
    write(&mut cpu, &mut cache, &step(0..20, &[2, 0]));
    let expected = attend(&mut cpu, &cache, &step(0..20, &[2, 0]));
    assert_ne!(expected[0], expected[1], "layers hold different keys and values");
    let save = |from, to| BlockCopy::Save { from: BlockId(from), to: HostBlockId(to) };
    let load = |from, to| BlockCopy::Load { from: HostBlockId(from), to: BlockId(to) };
    cpu.copy_blocks(&mut cache, &mut [save(2, 1), save(0, 2)].into_iter()).unwrap();
    // Other tokens take the blocks; the saved ones are loaded elsewhere, one of them by way of the other's block.
    write(&mut cpu, &mut cache, &step(50..82, &[0, 2]));
    assert_ne!(attend(&mut cpu, &cache, &step(0..20, &[2, 0])), expected);
    let copies = [load(2, 3), save(3, 0), load(1, 3), load(0, 1)];
    cpu.copy_blocks(&mut cache, &mut copies.into_iter()).unwrap();
    assert_eq!(attend(&mut cpu, &cache, &step(0..20, &[3, 1])), expected);
}

#[test]
fn extra_rotation_has_the_bits_of_the_same_table_row() {
    let mut cpu = Cpu::new(1).unwrap();
    cpu.reserve(1 << 24).unwrap();
    let width = HEADS.qkv_width();
    let table = cpu.load_matrix(&[part(&Table { rows: 100, columns: width }, Dtype::F32)]).unwrap();
    let mut qkv = cpu.allocate(40 * width).unwrap();
    let slots = cpu.allocate_slots(&STEP).unwrap();
    let mut short_rope = cpu.load_rope(&rope(10), &STEP).unwrap();
    let mut rope_of_20 = cpu.load_rope(&rope(20), &STEP).unwrap();
    let mut cache = cpu.allocate_cache(&cache_spec(4, 0)).unwrap();
    let mut rotated = |rope: &mut _, inputs: &StepInputs| {
        let step = cpu.upload(inputs, rope, &slots, &cache, None).unwrap();
        cpu.embed(step, &slots, &table, &mut qkv).unwrap();
        cpu.rope_write_kv(step, rope, heads(0), &mut qkv, &mut cache).unwrap();
        let mut values = vec![0.0; 20 * width];
        cpu.download(&qkv, 0, &mut values).unwrap();
        values
    };
    let plain = step(0..20, &[0, 1]);
    let mut extra = plain.clone();
    extra.positions[10..].iter_mut().for_each(|position| *position = EXTRA | (*position - 10));
    extra.extra_rotations = vec![0.0; 10 * HEADS.head_dim];
    rope(20).read(10..20, &mut extra.extra_rotations);
    assert_eq!(rotated(&mut short_rope, &extra), rotated(&mut rope_of_20, &plain));
}

#[test]
fn upload_refuses_every_index_out_of_range() {
    let mut cpu = Cpu::new(1).unwrap();
    cpu.reserve(1 << 24).unwrap();
    let slots = cpu.allocate_slots(&STEP).unwrap();
    let mut rope = cpu.load_rope(&rope(40), &STEP).unwrap();
    let cache = cpu.allocate_cache(&cache_spec(4, 0)).unwrap();
    let mut upload = |change: fn(&mut StepInputs)| {
        let mut inputs = step(0..20, &[2, 0]);
        inputs.output_rows = vec![0, 19];
        change(&mut inputs);
        cpu.upload(&inputs, &mut rope, &slots, &cache, None).map(|_| ())
    };
    assert_eq!(upload(|_| {}), Ok(()));
    assert_eq!(upload(|inputs| inputs.tokens[3] = FOLLOWS | 2), Ok(()));
    let changes: [fn(&mut StepInputs); 17] = [
        |inputs| inputs.tokens[3] = STEP.vocabulary as u32,
        |inputs| inputs.tokens[3] = FOLLOWS | 3,
        |inputs| inputs.positions[19] = 40,
        |inputs| inputs.positions[19] = EXTRA,
        |inputs| inputs.positions.truncate(19),
        |inputs| inputs.query_scales = vec![1.0; 19],
        |inputs| inputs.write_blocks[0] = 4,
        |inputs| inputs.write_offsets[0] = 16,
        |inputs| inputs.blocks[1] = 4,
        |inputs| inputs.output_rows[1] = 20,
        |inputs| inputs.sequences[0].first_query = 1,
        |inputs| inputs.sequences[0].num_queries = 19,
        |inputs| inputs.sequences[0].start = 13,
        |inputs| inputs.sequences[0].blocks = 1..3,
        |inputs| inputs.adapters = vec![AdapterRows { rows: 19..21, adapter: 0 }],
        |inputs| inputs.adapters = vec![AdapterRows { rows: 3..3, adapter: 0 }],
        |inputs| inputs.adapters = vec![AdapterRows { rows: 0..20, adapter: 0 }], // not loaded
    ];
    for (number, change) in changes.into_iter().enumerate() {
        assert!(matches!(upload(change), Err(DeviceError::InvalidStep(_))), "change {number}");
    }
}
