//! A fake executor without a thread. It computes nothing but remembers everything: its cache stores, per block and
//! offset, whose token was written there, and every row reads back all positions before it. A block handed out too
//! early, a wrong table, a skipped or repeated position, a wrong input token: all show as a wrong memory.

use std::collections::{HashSet, VecDeque};

use penstock_engine::{DEPTH, Limits, StepDone, StepPlan, Work};

use crate::oracle;

pub struct Device {
    limits: Limits,
    /// Per block and offset: which tenancy of a slot wrote it, and what.
    cache: Vec<Vec<Option<(u64, u32)>>>,
    slots: Vec<Slot>,
    plans: VecDeque<Box<StepPlan>>,
    last_step: u64,
    num_tenancies: u64,
}

/// What the executor keeps for a slot between steps.
#[derive(Clone, Default)]
struct Slot {
    /// One number per sequence that has held this slot.
    tenancy: u64,
    tokens: Vec<u32>,
    last_sample: Option<u32>,
    /// A step of this tenant has failed: what is left of it in flight is garbage.
    is_poisoned: bool,
}

impl Device {
    pub fn new(limits: &Limits) -> Self {
        Self {
            cache: vec![vec![None; limits.block_size]; limits.num_blocks],
            slots: vec![Slot::default(); limits.max_num_seqs],
            limits: limits.clone(),
            plans: VecDeque::new(),
            last_step: 0,
            num_tenancies: 0,
        }
    }

    pub fn num_plans(&self) -> usize {
        self.plans.len()
    }

    pub fn submit(&mut self, plan: Box<StepPlan>) {
        assert!(self.plans.len() < DEPTH);
        assert_eq!(plan.step, self.last_step + 1);
        self.last_step = plan.step;
        let num_tokens: u32 = plan.work.iter().map(|work| work.num_tokens).sum();
        assert!(num_tokens >= 1 && num_tokens as usize <= self.limits.max_num_batched_tokens);
        let slots: HashSet<_> = plan.work.iter().map(|work| work.slot).collect();
        assert_eq!(slots.len(), plan.work.len(), "a slot has two rows");
        assert!(slots.iter().all(|slot| (*slot as usize) < self.limits.max_num_seqs));
        let blocks: HashSet<_> = plan.blocks.iter().collect();
        assert_eq!(blocks.len(), plan.blocks.len(), "a block is in two places");
        self.plans.push_back(plan);
    }

    /// Runs the oldest plan.
    pub fn complete(&mut self) -> StepDone {
        let mut plan = self.plans.pop_front().unwrap();
        for index in 0..plan.work.len() {
            self.run(index, &mut plan);
        }
        StepDone { plan, result: Ok(()) }
    }

    /// Fails the oldest plan, after writing rubbish wherever it would have written.
    pub fn fail(&mut self, text: &str) -> StepDone {
        let plan = self.plans.pop_front().unwrap();
        for work in &plan.work {
            if work.start == 0 {
                self.new_tenant(work.slot);
            }
            self.slots[work.slot as usize].is_poisoned = true;
            self.write_rubbish(work, &plan);
        }
        StepDone { plan, result: Err(text.into()) }
    }

    fn run(&mut self, index: usize, plan: &mut StepPlan) {
        let work = plan.work[index].clone();
        if work.start == 0 {
            self.new_tenant(work.slot);
        }
        if self.slots[work.slot as usize].is_poisoned {
            self.write_rubbish(&work, plan);
        } else {
            self.check_and_write(&work, plan);
        }
        if let Some(sample) = &work.sample {
            let token = oracle::sample(&sample.request, sample.index, sample.suppress_stops);
            self.slots[work.slot as usize].last_sample = Some(token.id);
            plan.sampled.push(token);
        }
    }

    fn new_tenant(&mut self, slot: u32) {
        self.num_tenancies += 1;
        self.slots[slot as usize] = Slot { tenancy: self.num_tenancies, ..Slot::default() };
    }

    fn write_rubbish(&mut self, work: &Work, plan: &StepPlan) {
        let blocks = &plan.blocks[work.blocks.start as usize..work.blocks.end as usize];
        for position in work.start..work.start + work.num_tokens {
            let (block, offset) = place(position as usize, blocks, self.limits.block_size);
            self.cache[block][offset] = None;
        }
    }

    fn check_and_write(&mut self, work: &Work, plan: &StepPlan) {
        let block_size = self.limits.block_size;
        let blocks = &plan.blocks[work.blocks.start as usize..work.blocks.end as usize];
        let given = &plan.tokens[work.tokens.start as usize..work.tokens.end as usize];
        let slot = &mut self.slots[work.slot as usize];
        let start = work.start as usize;
        let end = start + work.num_tokens as usize;

        assert_eq!(start, slot.tokens.len(), "positions are skipped or repeated");
        assert_eq!(blocks.len(), end.div_ceil(block_size), "the table does not end with the row");
        let input = match work.follows_sample {
            true => {
                assert_eq!((given.len(), work.num_tokens), (0, 1));
                vec![slot.last_sample.expect("nothing was sampled to follow")]
            }
            false => given.to_vec(),
        };
        assert_eq!(input.len(), work.num_tokens as usize);
        if let Some(sampled) = slot.last_sample.take() {
            assert_eq!(input, [sampled], "the input is not what was sampled");
        }
        for (position, &token) in slot.tokens.iter().enumerate() {
            let (block, offset) = place(position, blocks, block_size);
            assert_eq!(
                self.cache[block][offset],
                Some((slot.tenancy, token)),
                "somebody else wrote at {position}"
            );
        }
        for (position, &token) in (start..end).zip(&input) {
            let (block, offset) = place(position, blocks, block_size);
            self.cache[block][offset] = Some((slot.tenancy, token));
        }
        slot.tokens.extend(input);

        let prompt_len = work.prompt_len as usize;
        let Some(sample) = &work.sample else {
            assert!(end < prompt_len, "a row that ends in the output samples");
            return;
        };
        let request = &*sample.request;
        assert_eq!(prompt_len, request.prompt.len());
        assert_eq!(&slot.tokens[..prompt_len], &request.prompt[..]);
        assert_eq!(sample.index as usize, end - prompt_len);
        assert_eq!(sample.suppress_stops, (sample.index as usize) < request.min_tokens);
        assert!((sample.index as usize) < request.max_tokens, "a token too many is computed");
        assert!(end < self.limits.max_model_len, "a token beyond the model is computed");
    }
}

fn place(position: usize, blocks: &[penstock_engine::BlockId], block_size: usize) -> (usize, usize) {
    (blocks[position / block_size].0 as usize, position % block_size)
}
