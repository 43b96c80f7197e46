//! A fake executor without a thread whose cache has contents. The contents of a position are a digest of its token and
//! of the contents of the positions before it, as with keys and values; the token after a row is sampled from
//! everything the row reads through its block table. So a wrong block, a stale hit, a missing or late copy, a block
//! that is reused too early, and a position that is skipped or computed from a wrong token all show as a wrong token.
//!
//! After a failed step, everything that it would have written is garbage, copies included unless it failed after them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};

use penstock_engine::{
    AdapterChange, AdapterId, DEPTH, Limits, NewSequence, Request, RowOutput, ScheduledRow, StepDone,
    StepError, StepOutput, StepPlan,
};
use penstock_types::{BlockCopy, PackedAdapter};

use crate::oracle;
use crate::random::mix;

type Block = Vec<u64>;

pub const ROW_FAILURE: &str = "simulated failure of a row";

#[derive(Clone)]
struct Slot {
    shared: Arc<Request>,
    choice: u32,
    generated: Vec<u32>,
    /// Its last row that samples was deferred.
    is_deferred: bool,
}

impl Slot {
    /// Whether a row follows a sample that there is not.
    fn is_deferred_before(&self, row: &ScheduledRow) -> bool {
        self.is_deferred && row.follows_sample
    }
}

pub struct Device {
    limits: Limits,
    cache: Vec<Block>,
    host: Vec<Block>,
    slots: Vec<Option<Slot>>,
    /// The sequences that have had a slot and have not ended, with their lifetimes.
    sequences: Vec<(Weak<()>, Weak<Request>, u32)>,
    /// By number.
    adapters: Vec<Option<AdapterId>>,
    /// Adapters loaded.
    pub num_loads: u64,
    /// The adapter changes of all plans: numbers, and the adapters that are loaded or `None`.
    pub changes: Vec<(u32, Option<AdapterId>)>,
    /// A plan that changes adapters has failed.
    has_unknown_adapters: bool,
    steps: VecDeque<(Box<StepPlan>, Box<StepOutput>)>,
    last_step: u64,
    num_garbage: u64,
    /// Copies made: saves, loads.
    pub num_copies: (u64, u64),
    /// Copies in one plan, at most.
    pub most_copies: usize,
    /// One of this many rows fails, while its step succeeds.
    pub failing_rows: Option<u64>,
    /// One of this many rows that sample is deferred.
    pub deferring_rows: Option<u64>,
    /// Deferred rows.
    pub num_deferred: u64,
    /// Rejected drafts.
    pub num_rejected_drafts: u64,
}

impl Device {
    pub fn new(limits: &Limits) -> Self {
        let mut device = Self {
            cache: vec![],
            host: vec![],
            slots: vec![None; limits.max_num_seqs],
            sequences: Vec::new(),
            adapters: vec![None; limits.max_adapters],
            num_loads: 0,
            changes: vec![],
            has_unknown_adapters: false,
            limits: limits.clone(),
            steps: VecDeque::new(),
            last_step: 0,
            num_garbage: 0,
            num_copies: (0, 0),
            most_copies: 0,
            failing_rows: None,
            deferring_rows: None,
            num_deferred: 0,
            num_rejected_drafts: 0,
        };
        device.cache = (0..limits.num_blocks).map(|_| device.garbage()).collect();
        device.host = (0..limits.host_blocks).map(|_| device.garbage()).collect();
        device
    }

    pub fn num_plans(&self) -> usize {
        self.steps.len()
    }

    pub fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
        assert!(self.steps.len() < DEPTH);
        assert_eq!((plan.step, output.step), (self.last_step + 1, plan.step));
        let StepOutput { adapters_changed, copies_done, rows, sampled, positions, forced, .. } = &*output;
        assert!(!adapters_changed && !copies_done && rows.is_empty() && sampled.is_empty());
        assert!(positions.is_empty() && forced.is_empty());
        self.last_step = plan.step;
        self.most_copies = self.most_copies.max(plan.copies.len());
        let num_tokens: u32 = plan.rows.iter().map(|row| row.num_tokens).sum();
        assert!(num_tokens >= 1 && num_tokens as usize <= self.limits.max_num_batched_tokens);
        let slots: HashSet<_> = plan.rows.iter().map(|row| row.slot).collect();
        assert_eq!(slots.len(), plan.rows.len(), "a slot has two rows");
        assert!(slots.iter().all(|slot| (*slot as usize) < self.limits.max_num_seqs));
        assert!(plan.rows.is_sorted_by_key(|row| row.adapter), "the rows of an adapter are apart");
        self.check_races(&plan);
        self.check_lifetimes(&plan);
        self.changes.extend(plan.adapter_changes.iter().map(|change| match change {
            AdapterChange::Load { number, weights } => (*number, Some(id_of(weights))),
            AdapterChange::Unload { number } => (*number, None),
        }));
        self.steps.push_back((plan, output));
    }

    /// A sequence has the same lifetime in all its slots, and no other sequence has it. Some have ended already.
    fn check_lifetimes(&mut self, plan: &StepPlan) {
        self.sequences.retain(|(lifetime, ..)| lifetime.strong_count() > 0);
        for new in plan.new_sequences.iter().filter(|new| new.lifetime.strong_count() > 0) {
            let request = Arc::downgrade(&new.request);
            match self.sequences.iter().find(|(lifetime, ..)| lifetime.ptr_eq(&new.lifetime)) {
                Some((_, known, choice)) => assert!(known.ptr_eq(&request) && *choice == new.choice),
                None => {
                    assert!(new.generated.is_empty(), "it had no slot before");
                    self.sequences.push((Weak::clone(&new.lifetime), request, new.choice));
                }
            }
        }
    }

    /// Rows are computed concurrently: a block that one writes, no other may read or write.
    fn check_races(&self, plan: &StepPlan) {
        let mut num_readers = HashMap::new();
        for row in &plan.rows {
            let table = table(row, plan);
            let end = (row.start + row.num_tokens) as usize;
            assert_eq!(
                table.len(),
                end.div_ceil(self.limits.block_size),
                "the table does not end with the row"
            );
            assert!(table.iter().all(|block| *block < self.limits.num_blocks));
            table.iter().for_each(|block| *num_readers.entry(*block).or_insert(0) += 1);
        }
        for row in &plan.rows {
            for block in &table(row, plan)[row.start as usize / self.limits.block_size..] {
                assert_eq!(num_readers[block], 1, "a block that is written is in two tables");
            }
        }
    }

    /// Whether the oldest plan changes adapters.
    pub fn changes_adapters(&self) -> bool {
        self.steps.front().is_some_and(|(plan, _)| !plan.adapter_changes.is_empty())
    }

    /// Runs the oldest plan.
    pub fn complete(&mut self) -> StepDone {
        if self.has_unknown_adapters {
            return self.fail("an adapter is not loaded");
        }
        let (plan, mut output) = self.steps.pop_front().unwrap();
        self.change_adapters(&plan);
        output.adapters_changed = true;
        self.assign_slots(&plan);
        self.make_copies(&plan);
        output.copies_done = true;
        for row in &plan.rows {
            self.run(row, &plan, &mut output);
        }
        StepDone { plan, output, result: Ok(()) }
    }

    /// Fails the oldest plan, copies and all. If it changes adapters, every later plan fails too.
    pub fn fail(&mut self, text: &str) -> StepDone {
        let (plan, output) = self.steps.pop_front().unwrap();
        self.has_unknown_adapters |= !plan.adapter_changes.is_empty();
        self.fail_copies(plan, output, text)
    }

    /// Fails the oldest plan after its changes of adapters, and before its copies are made.
    pub fn fail_after_adapters(&mut self, text: &str) -> StepDone {
        let (plan, mut output) = self.steps.pop_front().unwrap();
        self.change_adapters(&plan);
        output.adapters_changed = true;
        self.fail_copies(plan, output, text)
    }

    fn fail_copies(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>, text: &str) -> StepDone {
        for copy in &plan.copies {
            match *copy {
                BlockCopy::Save { to, .. } => self.host[to.0 as usize] = self.garbage(),
                BlockCopy::Load { to, .. } => self.cache[to.0 as usize] = self.garbage(),
            }
        }
        self.corrupt_rows(&plan);
        StepDone { plan, output, result: Err(StepError::Failed(text.into())) }
    }

    /// Fails the oldest plan after its copies are made.
    pub fn fail_after_copies(&mut self, text: &str) -> StepDone {
        let (plan, mut output) = self.steps.pop_front().unwrap();
        self.change_adapters(&plan);
        output.adapters_changed = true;
        self.make_copies(&plan);
        output.copies_done = true;
        self.corrupt_rows(&plan);
        StepDone { plan, output, result: Err(StepError::Failed(text.into())) }
    }

    /// Loses the device in the oldest plan.
    pub fn lose(&mut self, text: &str) -> StepDone {
        StepDone { result: Err(StepError::DeviceLost(text.into())), ..self.fail(text) }
    }

    fn change_adapters(&mut self, plan: &StepPlan) {
        for change in &plan.adapter_changes {
            match change {
                AdapterChange::Load { number, weights } => {
                    let former = self.adapters[*number as usize].replace(id_of(weights));
                    assert_eq!(former, None, "the number of an adapter is in use");
                    self.num_loads += 1;
                }
                AdapterChange::Unload { number } => {
                    self.adapters[*number as usize].take().expect("an adapter that is loaded");
                }
            }
        }
    }

    fn make_copies(&mut self, plan: &StepPlan) {
        for copy in &plan.copies {
            match *copy {
                BlockCopy::Save { from, to } => {
                    self.host[to.0 as usize] = self.cache[from.0 as usize].clone();
                    self.num_copies.0 += 1;
                }
                BlockCopy::Load { from, to } => {
                    self.cache[to.0 as usize] = self.host[from.0 as usize].clone();
                    self.num_copies.1 += 1;
                }
            }
        }
    }

    fn assign_slots(&mut self, plan: &StepPlan) {
        for slot in &plan.freed_slots {
            self.slots[*slot as usize] = None;
        }
        for NewSequence { slot, request, choice, generated, .. } in &plan.new_sequences {
            let generated = plan.tokens[generated.start as usize..generated.end as usize].to_vec();
            let (shared, choice) = (Arc::clone(request), *choice);
            self.slots[*slot as usize] = Some(Slot { shared, choice, generated, is_deferred: false });
        }
    }

    fn corrupt_rows(&mut self, plan: &StepPlan) {
        self.assign_slots(plan);
        for row in &plan.rows {
            if let (Some(slot), Some(_)) = (&mut self.slots[row.slot as usize], row.sample)
                && !slot.is_deferred_before(row)
            {
                slot.generated.push(oracle::VOCABULARY);
            }
            let table = table(row, plan);
            for position in row.start as usize..(row.start + row.num_tokens) as usize {
                let garbage = self.garbage()[0];
                *self.cell(position, &table) = garbage;
            }
        }
    }

    /// The contents of a block that was not written: no two are equal.
    fn garbage(&mut self) -> Block {
        self.num_garbage += 1;
        vec![mix(!self.num_garbage); self.limits.block_size]
    }

    fn cell(&mut self, position: usize, table: &[usize]) -> &mut u64 {
        let block_size = self.limits.block_size;
        &mut self.cache[table[position / block_size]][position % block_size]
    }

    fn run(&mut self, row: &ScheduledRow, plan: &StepPlan, output: &mut StepOutput) {
        let table = table(row, plan);
        let given = &plan.tokens[row.tokens.start as usize..row.tokens.end as usize];
        let slot = self.slots[row.slot as usize].clone().expect("a row without a request");
        let follows_deferred = slot.is_deferred_before(row);
        let (request, generated) = (slot.shared.of_choice(slot.choice), slot.generated);
        let input = match row.follows_sample {
            true => {
                assert_eq!((given.len(), row.num_tokens, row.num_drafts), (0, 1, 0));
                let last = generated.last().copied();
                vec![match follows_deferred {
                    true => oracle::VOCABULARY,
                    false => last.expect("nothing was sampled to follow"),
                }]
            }
            false => given.to_vec(),
        };
        assert_eq!(input.len(), row.num_tokens as usize);
        let prompt_len = row.prompt_len as usize;
        let adapter =
            row.adapter.map(|number| self.adapters[number as usize].expect("an adapter that is loaded"));
        assert_eq!(adapter, request.adapter, "a row has another adapter");
        for (position, token) in (row.start as usize..).zip(&input) {
            let before = position.checked_sub(1).map(|before| *self.cell(before, &table));
            *self.cell(position, &table) =
                oracle::digest(before, position, *token, (prompt_len, adapter), &self.limits);
        }
        let end = (row.start + row.num_tokens) as usize;
        assert!(end <= self.limits.max_model_len, "a position beyond the model is computed");
        let chance = mix(plan.step << 8 | u64::from(row.slot));
        let is_one_of = |rows: Option<u64>| rows.is_some_and(|rows| chance.is_multiple_of(rows));
        if is_one_of(self.failing_rows) && !follows_deferred {
            return self.fail_row(row, output);
        }
        for position in row.prompt_outputs.clone() {
            assert!((row.start..end as u32).contains(&position), "a position that was not computed");
            let read = self.read(position as usize + 1, &table);
            output.positions.push(oracle::position(&request, position as usize, read.into_iter()));
        }
        let num_positions = row.prompt_outputs.len() as u32;
        let Some(sample) = row.sample else {
            assert_eq!(row.num_drafts, 0, "drafts that are not verified");
            return output.rows.push(RowOutput { num_positions, ..RowOutput::default() });
        };
        let (num_drafts, num_known) = (row.num_drafts as usize, input.len() - row.num_drafts as usize);
        assert!(num_known > 0);
        let is_deferred = follows_deferred || is_one_of(self.deferring_rows);
        self.slot(row).is_deferred = is_deferred;
        if is_deferred {
            self.num_deferred += 1;
            return output.rows.push(RowOutput { num_positions, is_deferred, ..RowOutput::default() });
        }
        assert_eq!(prompt_len, request.prompt.len());
        assert_eq!(sample.index as usize, end - num_drafts - prompt_len);
        assert_eq!(sample.index as usize, generated.len());
        assert!(generated.len() + num_drafts < request.max_tokens, "a token too many is computed");
        assert!(end < self.limits.max_model_len, "a token beyond the model is computed");
        let mut num_tokens = 0;
        loop {
            let index = sample.index + num_tokens as u32;
            let suppress_stops = (index as usize) < request.min_tokens;
            let read = self.read(row.start as usize + num_known + num_tokens, &table);
            let token = oracle::sample(&request, index, suppress_stops, read.into_iter());
            let is_accepted = input.get(num_known + num_tokens) == Some(&token.id);
            self.slot(row).generated.push(token.id);
            output.sampled.push(token);
            num_tokens += 1;
            if !is_accepted {
                break;
            }
        }
        self.num_rejected_drafts += (num_drafts + 1 - num_tokens) as u64;
        let first = output.forced.len() as u32;
        if request.grammar.is_some() {
            let read = self.read(row.start as usize + num_known + num_tokens - 1, &table);
            self.force(
                &request,
                read,
                self.slots[row.slot as usize].clone().unwrap().generated,
                &mut output.forced,
            );
        }
        let forced = first..output.forced.len() as u32;
        let num_tokens = num_tokens as u32;
        output.rows.push(RowOutput { num_tokens, num_positions, forced, ..RowOutput::default() });
    }

    /// The tokens that a grammar forces: up to twenty, one of which is wrong at times.
    fn force(&self, request: &Request, mut read: Vec<u64>, generated: Vec<u32>, forced: &mut Vec<u32>) {
        let (mut token, chance) = (*generated.last().unwrap(), mix(*read.last().unwrap()));
        for index in generated.len()..generated.len() + (chance % 21) as usize {
            let before = read.last().copied();
            let digest = oracle::digest(
                before,
                read.len(),
                token,
                (request.prompt.len(), request.adapter),
                &self.limits,
            );
            read.push(digest);
            let suppress_stops = index < request.min_tokens;
            token = oracle::sample(request, index as u32, suppress_stops, read.iter().copied()).id;
            let is_wrong = (chance >> 8).is_multiple_of(4) && (chance >> 16) % 7 == index as u64 % 7;
            forced.push(if is_wrong { (token + 1) % oracle::VOCABULARY } else { token });
        }
    }

    fn fail_row(&mut self, row: &ScheduledRow, output: &mut StepOutput) {
        if row.sample.is_some() {
            self.slot(row).generated.push(oracle::VOCABULARY);
        }
        output.rows.push(RowOutput { failure: Some(ROW_FAILURE.into()), ..RowOutput::default() });
    }

    /// The row's slot.
    fn slot(&mut self, row: &ScheduledRow) -> &mut Slot {
        self.slots[row.slot as usize].as_mut().expect("a row without a request")
    }

    /// The contents of the first positions.
    fn read(&mut self, num_positions: usize, table: &[usize]) -> Vec<u64> {
        (0..num_positions).map(|position| *self.cell(position, table)).collect()
    }
}

fn id_of(weights: &PackedAdapter) -> AdapterId {
    AdapterId(u64::from_le_bytes(weights.bytes().try_into().unwrap()))
}

fn table(row: &ScheduledRow, plan: &StepPlan) -> Vec<usize> {
    let blocks = &plan.blocks[row.blocks.start as usize..row.blocks.end as usize];
    blocks.iter().map(|block| block.0 as usize).collect()
}
