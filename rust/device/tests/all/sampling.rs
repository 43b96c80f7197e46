//! Sampling on a backend: batches have the bits of single entries, drafts those of plain decoding.

use std::ops::Range;
use std::sync::Arc;

use penstock_device::cpu::{Cpu, CpuBuffer, CpuScratch, CpuSlots};
use penstock_device::{
    Compute, Load, MatrixPart, Memory, RowSource, Sample, Sampled, SamplingBatch, SamplingEntry, SlotParams,
    StepInputs, StepSpec, WeightSource,
};
use penstock_types::{Dtype, Epilogue, HeadShape, LogprobsRequest, Sampling};

const VOCABULARY: usize = 333;
const ROWS: usize = 9;
const SLOTS: usize = 256;

/// Different logits in each row.
struct Logits;

impl RowSource for Logits {
    fn rows(&self) -> usize {
        ROWS
    }

    fn columns(&self) -> usize {
        VOCABULARY
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(VOCABULARY)) {
            for (id, logit) in out.iter_mut().enumerate() {
                *logit = ((row * 131 + id * 17) as f32).sin() * 4.0;
            }
        }
    }
}

impl WeightSource for Logits {}

/// A whole matrix.
fn part(source: &dyn WeightSource, dtype: Dtype) -> MatrixPart<'_> {
    MatrixPart { source, format: dtype.into() }
}

/// A backend with its logits.
struct Device {
    cpu: Cpu,
    logits: CpuBuffer,
    slots: CpuSlots,
    scratch: CpuScratch,
}

impl Device {
    fn new(threads: usize) -> Self {
        let mut cpu = Cpu::new(threads).unwrap();
        cpu.reserve(1 << 22).unwrap();
        let heads = HeadShape { heads: 1, kv_heads: 1, head_dim: 1 };
        let spec = StepSpec {
            tokens: 1,
            sequences: SLOTS,
            logits_rows: 1,
            positions: 1,
            block_size: 16,
            heads,
            vocabulary: VOCABULARY,
        };
        let (slots, scratch) = (cpu.allocate_slots(&spec).unwrap(), cpu.allocate_scratch(&spec).unwrap());
        let table = cpu.load_matrix(&[part(&Logits, Dtype::F32)]).unwrap();
        let mut logits = cpu.allocate(ROWS * VOCABULARY).unwrap();
        let inputs = StepInputs { tokens: (0..ROWS as u32).collect(), ..StepInputs::default() };
        cpu.embed(&inputs, &slots, &table, &mut logits).unwrap();
        Self { cpu, logits, slots, scratch }
    }

    fn admit(&mut self, slot: u32, params: &SlotParams<'_>) {
        self.cpu.admit_slot(&mut self.slots, slot, params).unwrap();
    }

    fn sample(&mut self, batch: &SamplingBatch, out: &mut Vec<Sampled>) {
        let Self { cpu, logits, slots, scratch } = self;
        let ticket = cpu.sample(logits, batch, slots, scratch).unwrap();
        cpu.collect(ticket, out).unwrap();
        assert_eq!(out.len(), batch.len());
    }

    /// The input of the next step for a slot: its last token.
    fn last_token(&mut self, slot: u32) -> u32 {
        let mut row = self.cpu.allocate(VOCABULARY).unwrap();
        let table = self.cpu.load_matrix(&[part(&Ids, Dtype::F32)]).unwrap();
        let inputs = StepInputs { tokens: vec![penstock_device::FOLLOWS | slot], ..StepInputs::default() };
        self.cpu.embed(&inputs, &self.slots, &table, &mut row).unwrap();
        let mut id = [0.0];
        self.cpu.download(&row, 0, &mut id).unwrap();
        id[0] as u32
    }
}

/// An embedding of one value: the id.
struct Ids;

impl RowSource for Ids {
    fn rows(&self) -> usize {
        VOCABULARY
    }

    fn columns(&self) -> usize {
        1
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        rows.zip(out).for_each(|(id, out)| *out = id as f32);
    }
}

impl WeightSource for Ids {}

fn entry(row: usize, slot: u32, index: u32) -> SamplingEntry {
    SamplingEntry { row: row as u32, slot, index, draft: None, given: None, mask: None, processed: None }
}

/// A request and the tokens it has.
struct Case {
    sampling: Sampling,
    prompt: Arc<[u32]>,
    generated: Vec<u32>,
    logprobs: Option<LogprobsRequest>,
    masked: bool,
    given: Option<u32>,
}

impl Case {
    fn params(&self) -> SlotParams<'_> {
        SlotParams {
            generated: &self.generated,
            logprobs: self.logprobs,
            prompt_logprobs: Some(2),
            ..SlotParams::new(&self.sampling, &self.prompt)
        }
    }
}

/// One case for each slot: greedy, random, filtered, penalised, masked, without candidates, given.
fn cases() -> Vec<Case> {
    let raw = Some(LogprobsRequest { top: 5, processed: false });
    let processed = Some(LogprobsRequest { top: 3, processed: true });
    let case = |slot: usize| {
        let sampling = Sampling { temperature: 0.9, seed: slot as u64 / 3, ..Sampling::default() };
        let (mut masked, mut given) = (false, None);
        let (sampling, logprobs) = match slot % 8 {
            0 => (Sampling { temperature: 0.0, ..sampling }, raw),
            1 => (sampling, None),
            2 => (Sampling { top_p: 0.8, ..sampling }, processed),
            3 => (Sampling { top_k: 30, typical_p: 0.7, ..sampling }, raw),
            4 => (Sampling { repetition_penalty: 1.4, frequency_penalty: 0.3, ..sampling }, raw),
            5 => {
                masked = true;
                (sampling, processed)
            }
            6 => (Sampling { allowed_token_ids: Some(vec![]), ..sampling }, raw),
            _ => {
                given = Some(100);
                (sampling, None)
            }
        };
        let generated = (0..50).map(|id| id * 3).collect();
        Case { sampling, prompt: vec![1, 5, 9, 200].into(), generated, logprobs, masked, given }
    };
    (0..200).map(case).collect()
}

fn admit(device: &mut Device, cases: &[Case]) {
    for (slot, case) in cases.iter().enumerate() {
        device.admit(slot as u32, &case.params());
    }
}

/// Appends the entry of the case in this slot.
fn push(batch: &mut SamplingBatch, slot: usize, case: &Case) {
    const MASK: [u32; 11] = [0xdead_beef, 0x0f0f_1234, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mask = case.masked.then(|| batch.push_mask(&MASK));
    let given = case.given;
    batch.push(SamplingEntry { mask, given, ..entry(slot * 7 % ROWS, slot as u32, slot as u32) });
}

/// Everything of a token, floats as bits.
fn bits(sampled: &Sampled) -> Option<Vec<u32>> {
    sampled.token().map(|token| {
        let top = token.top().iter().flat_map(|(id, logprob)| [*id, logprob.to_bits()]);
        [token.id, token.logprob.to_bits()].into_iter().chain(top).collect()
    })
}

#[test]
fn batch_has_same_bits_as_single_entries() {
    let cases = cases();
    let mut device = Device::new(1);
    admit(&mut device, &cases);
    let (mut out, mut has_none) = (vec![], false);
    let alone: Vec<_> = cases
        .iter()
        .enumerate()
        .map(|(slot, case)| {
            let mut batch = SamplingBatch::default();
            push(&mut batch, slot, case);
            device.sample(&batch, &mut out);
            has_none |= out[0] == Sampled::NoCandidates;
            bits(&out[0])
        })
        .collect();
    assert!(has_none);
    for threads in 1..=3 {
        let mut device = Device::new(threads);
        // The second time, the result buffers hold the first results.
        for _ in 0..2 {
            admit(&mut device, &cases);
            let mut batch = SamplingBatch::default();
            cases.iter().enumerate().for_each(|(slot, case)| push(&mut batch, slot, case));
            device.sample(&batch, &mut out);
            let together: Vec<_> = out.iter().map(bits).collect();
            assert_eq!(together, alone, "{threads} threads");
        }
    }
}

/// Tokens of slot 0, sampled one at a time from rows 0, 1, 2 and so on.
fn plain_tokens(device: &mut Device, params: &SlotParams<'_>, count: usize) -> Vec<Sampled> {
    device.admit(0, params);
    let mut out = vec![];
    let tokens = (0..count).map(|index| {
        let mut batch = SamplingBatch::default();
        batch.push(entry(index, 0, index as u32));
        device.sample(&batch, &mut out);
        out[0].clone()
    });
    tokens.collect()
}

/// Outputs of a batch with the drafts, before they are rejected.
fn drafted(device: &mut Device, drafts: &[u32], tile: usize) -> Vec<Sampled> {
    let entries = (0..=drafts.len()).map(|index| {
        let draft = index.checked_sub(1).map(|before| drafts[before]);
        SamplingEntry { draft, ..entry(index, 0, index as u32) }
    });
    let (entries, mut sampled, mut out): (Vec<_>, _, _) = (entries.collect(), vec![], vec![]);
    for tile in entries.chunks(tile) {
        let mut batch = SamplingBatch::default();
        tile.iter().for_each(|entry| batch.push(*entry));
        device.sample(&batch, &mut out);
        sampled.append(&mut out);
    }
    let accepted = sampled.iter().take_while(|sampled| sampled.token().is_some()).count();
    assert!(sampled[accepted..].iter().all(|sampled| *sampled == Sampled::Rejected));
    sampled.truncate(accepted);
    sampled
}

#[test]
fn verified_drafts_have_the_bits_of_plain_decoding() {
    let prompt = Arc::from([1, 5, 9]);
    let sampling = Sampling {
        repetition_penalty: 1.5,
        frequency_penalty: 0.4,
        no_repeat_ngram_size: 2,
        bad_token_sequences: vec![vec![40], vec![9, 20]],
        seed: 3,
        ..Sampling::default()
    };
    let logprobs = Some(LogprobsRequest { top: 4, processed: true });
    let params = SlotParams { logprobs, ..SlotParams::new(&sampling, &prompt) };
    let mut device = Device::new(2);
    let plain = plain_tokens(&mut device, &params, ROWS);
    let ids: Vec<u32> = plain.iter().filter_map(Sampled::token).map(|token| token.id).collect();
    for num_right in 0..ROWS {
        let draft = |(index, id): (usize, &u32)| if index < num_right { *id } else { (id + 1) % 300 };
        let drafts: Vec<u32> = ids[..ROWS - 1].iter().enumerate().map(draft).collect();
        for tile in [ROWS, 1, 2, 4] {
            device.admit(0, &params);
            let sampled = drafted(&mut device, &drafts, tile);
            assert_eq!(sampled.len(), num_right + 1, "{num_right} drafts are right; tiles of {tile}");
            let (sampled, plain): (Vec<_>, Vec<_>) =
                (sampled.iter().map(bits).collect(), plain[..=num_right].iter().map(bits).collect());
            assert_eq!(sampled, plain);
            assert_eq!(device.last_token(0), ids[num_right]);
        }
    }
}

#[test]
fn no_position_after_a_stop_token_is_sampled() {
    let (sampling, prompt) = (Sampling { temperature: 0.0, ..Sampling::default() }, Arc::from([1]));
    let params = SlotParams::new(&sampling, &prompt);
    let mut device = Device::new(1);
    let sampled = plain_tokens(&mut device, &params, ROWS);
    let ids: Vec<u32> = sampled.iter().filter_map(Sampled::token).map(|token| token.id).collect();
    let stop = [ids[3]];
    assert!(!ids[..3].contains(&stop[0]));
    device.admit(0, &SlotParams { stop_token_ids: &stop, ..params });
    assert_eq!(drafted(&mut device, &ids[..ROWS - 1], ROWS).len(), 4);
    // Before `min_tokens` it is masked.
    device.admit(0, &SlotParams { stop_token_ids: &stop, min_tokens: 4, ..params });
    assert_eq!(drafted(&mut device, &ids[..ROWS - 1], ROWS).len(), 4, "another token rejects the draft");
    assert_ne!(device.last_token(0), stop[0]);
}

#[test]
fn slot_without_generated_tokens_follows_its_prompt() {
    let (sampling, prompt) = (Sampling::default(), Arc::from([1, 7]));
    let mut device = Device::new(1);
    device.admit(3, &SlotParams::new(&sampling, &prompt));
    assert_eq!(device.last_token(3), 7);
    device.admit(3, &SlotParams { generated: &[20, 30], ..SlotParams::new(&sampling, &prompt) });
    assert_eq!(device.last_token(3), 30);
}

#[test]
fn timed_backend_counts_calls_bytes_and_flops() {
    let mut timed = penstock_device::Timed::new(Cpu::new(1).unwrap());
    let profile = timed.profile();
    timed.reserve(1 << 22).unwrap();
    let table = timed.load_matrix(&[part(&Logits, Dtype::Bf16)]).unwrap();
    let (x, mut out) = (timed.allocate_operand(3, VOCABULARY).unwrap(), timed.allocate(3 * ROWS).unwrap());
    assert_eq!(profile.rows(), [], "loading is not measured");
    for rows in [0..3, 1..3] {
        timed.linear(rows, &x, &table, Epilogue::Store, &mut out).unwrap();
    }
    let row = profile.rows().remove(0);
    assert_eq!((profile.rows().len(), row.operation.as_str(), row.calls), (1, "linear", 2));
    assert_eq!(row.flops, Some(2 * 5 * (ROWS * VOCABULARY) as u64));
    assert_eq!(row.bytes, (2 * 2 * ROWS * VOCABULARY + 4 * 5 * (ROWS + VOCABULARY)) as u64);
    assert!(row.seconds > 0.0);
    profile.reset();
    assert_eq!(profile.rows(), []);
}
