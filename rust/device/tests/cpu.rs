//! The CPU backend's memory: what it says it will take, what it takes, and blocks that go to the host tier and back.

#![allow(clippy::unwrap_used)]

use std::ops::Range;

use penstock_device::cpu::Cpu;
use penstock_device::{Backend, CacheSpec, DeviceError, RowSource, StepInputs, StepSpec};
use penstock_types::{
    AttentionParams, AttentionRow, BlockCopy, BlockId, Dtype, HeadShape, HostBlockId, KvDtype,
};

const HEADS: HeadShape = HeadShape { heads: 4, kv_heads: 2, head_dim: 8 };
const LAYERS: usize = 3;
const BLOCK_SIZE: usize = 16;

/// Rows of numbers that differ from token to token and from column to column.
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
    vocabulary: 50,
};

#[test]
fn every_size_that_is_told_is_the_size_that_is_taken() {
    let mut cpu = Cpu::new(2).unwrap();
    let table = Table { rows: 33, columns: 10 };
    let spec = cache_spec(5, 2);
    let told = [
        cpu.matrix_bytes(33, 10, Dtype::Bf16),
        cpu.buffer_bytes(7),
        cpu.buffer_bytes(1001),
        cpu.scratch_bytes(&STEP),
        cpu.cache_bytes(&spec, 5) + cpu.cache_bytes(&spec, 2),
    ];
    cpu.reserve(told.iter().sum()).unwrap();
    let mut taken = Vec::new();
    let mut before = 0;
    let mut note = |cpu: &Cpu| {
        taken.push(cpu.memory().in_use - before);
        before = cpu.memory().in_use;
    };
    let _matrix = cpu.load_matrix(&table, Dtype::Bf16).unwrap();
    note(&cpu);
    let _vector = cpu.load_vector(&[1.0; 7]).unwrap();
    note(&cpu);
    let _buffer = cpu.allocate(1001).unwrap();
    note(&cpu);
    let _scratch = cpu.allocate_scratch(&STEP).unwrap();
    note(&cpu);
    let _cache = cpu.allocate_cache(&spec).unwrap();
    note(&cpu);
    assert_eq!(taken, told);
    // All of it: a single value more is refused, and the refusal says who has the memory.
    let refusal = cpu.allocate(1).err().unwrap();
    assert!(matches!(refusal, DeviceError::Exhausted(_)), "{refusal}");
    let message = refusal.to_string();
    assert!(message.starts_with("workspace needs 4 bytes; 0 of "), "{message}");
    assert!(message.contains("in use: KV cache "), "{message}");
}

#[test]
fn memory_no_machine_has_is_refused_with_its_size() {
    let error = Cpu::new(1).unwrap().reserve(1 << 60).unwrap_err();
    assert!(matches!(error, DeviceError::OutOfMemory { bytes, .. } if bytes == 1 << 60), "{error}");
    let mut cpu = Cpu::new(1).unwrap();
    cpu.reserve(1 << 16).unwrap();
    assert!(matches!(cpu.allocate(usize::MAX), Err(DeviceError::Exhausted(_))));
}

#[test]
fn room_that_no_machine_has_for_the_arrays_of_a_step_is_refused() {
    let spec = StepSpec { tokens: usize::MAX, ..STEP };
    assert_eq!(StepInputs::bytes(&spec), u64::MAX);
    assert!(matches!(StepInputs::with_room(&spec), Err(DeviceError::OutOfMemory { .. })));
    let inputs = StepInputs::with_room(&STEP).unwrap();
    let bytes = 4
        * (inputs.tokens.capacity() + inputs.write_blocks.capacity() + inputs.write_offsets.capacity())
        + 4 * (inputs.cosines.capacity() + inputs.sines.capacity())
        + size_of::<AttentionRow>() * inputs.sequences.capacity()
        + 4 * (inputs.blocks.capacity() + inputs.output_rows.capacity());
    assert_eq!(StepInputs::bytes(&STEP), bytes as u64);
}

/// A sequence of `tokens` in `blocks`.
fn step(tokens: Range<u32>, blocks: &[u32]) -> StepInputs {
    let count = tokens.len();
    StepInputs {
        tokens: tokens.collect(),
        write_blocks: (0..count).map(|row| blocks[row / BLOCK_SIZE]).collect(),
        write_offsets: (0..count).map(|row| (row % BLOCK_SIZE) as u32).collect(),
        cosines: vec![1.0; count * HEADS.head_dim / 2],
        sines: vec![0.0; count * HEADS.head_dim / 2],
        sequences: vec![AttentionRow {
            first_query: 0,
            num_queries: count,
            start: 0,
            blocks: 0..blocks.len(),
        }],
        blocks: blocks.to_vec(),
        output_rows: Vec::new(),
    }
}

#[test]
fn a_block_that_was_saved_is_the_same_in_every_layer_wherever_it_is_loaded() {
    let mut cpu = Cpu::new(2).unwrap();
    cpu.reserve(1 << 24).unwrap();
    let width = HEADS.qkv_width();
    let table = cpu.load_matrix(&Table { rows: 100, columns: width }, Dtype::F32).unwrap();
    let (mut qkv, mut out) = (cpu.allocate(40 * width).unwrap(), cpu.allocate(40 * width).unwrap());
    let mut scratch = cpu.allocate_scratch(&STEP).unwrap();
    let mut cache = cpu.allocate_cache(&cache_spec(4, 3)).unwrap();
    let params = AttentionParams { scale: 0.3, window: None, softcap: None };
    let mut write = |cpu: &mut Cpu, cache: &mut _, inputs: &StepInputs| {
        for layer in 0..LAYERS {
            let mut inputs = inputs.clone();
            inputs.tokens.iter_mut().for_each(|token| *token += layer as u32);
            cpu.embed(&inputs, &table, &mut qkv).unwrap();
            cpu.rope_write_kv(&inputs, HEADS, None, &mut qkv, layer, cache).unwrap();
        }
    };
    let queries = cpu.load_matrix(&Table { rows: 100, columns: width }, Dtype::F32).unwrap();
    let mut asked = cpu.allocate(40 * width).unwrap();
    let mut attend = |cpu: &mut Cpu, cache: &_, inputs: &StepInputs| -> Vec<Vec<f32>> {
        cpu.embed(inputs, &queries, &mut asked).unwrap();
        let layers = 0..LAYERS;
        let attended = layers.map(|layer| {
            let mut values = vec![0.0; inputs.tokens.len() * HEADS.query_width()];
            cpu.attention(inputs, HEADS, params, layer, cache, &asked, &mut scratch, &mut out).unwrap();
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
    // Others take the blocks; the saved ones come back elsewhere, one of them by way of the other's place.
    write(&mut cpu, &mut cache, &step(50..82, &[0, 2]));
    assert_ne!(attend(&mut cpu, &cache, &step(0..20, &[2, 0])), expected);
    let copies = [load(2, 3), save(3, 0), load(1, 3), load(0, 1)];
    cpu.copy_blocks(&mut cache, &mut copies.into_iter()).unwrap();
    assert_eq!(attend(&mut cpu, &cache, &step(0..20, &[3, 1])), expected);
}
