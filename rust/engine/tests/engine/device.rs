//! A fake executor without a thread whose cache has contents. What a position holds is a digest of its token and of
//! what was read for the positions before it, as with keys and values; the token after a row is drawn from everything
//! the row reads through its block table. So a wrong block, a stale hit, a copy that is missing or comes too late, a
//! block handed out too early, a position skipped or computed from a wrong token: all show as a wrong token.
//!
//! What a failed step would have written is rubbish afterwards, copies included unless it failed after them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use penstock_engine::{Answer, BlockCopy, DEPTH, Limits, Request, Seat, StepDone, StepPlan, Work};

use crate::oracle;
use crate::random::mix;

type Block = Vec<u64>;

pub struct Device {
    limits: Limits,
    cache: Vec<Block>,
    host: Vec<Block>,
    /// Whose each slot is, and what was generated there.
    slots: Vec<Option<(Arc<Request>, Vec<u32>)>>,
    plans: VecDeque<Box<StepPlan>>,
    last_step: u64,
    num_rubbish: u64,
    /// Copies made: saves, loads.
    pub num_copies: (u64, u64),
    /// Copies in one plan, at most.
    pub most_copies: usize,
}

impl Device {
    pub fn new(limits: &Limits) -> Self {
        let mut device = Self {
            cache: vec![],
            host: vec![],
            slots: vec![None; limits.max_num_seqs],
            limits: limits.clone(),
            plans: VecDeque::new(),
            last_step: 0,
            num_rubbish: 0,
            num_copies: (0, 0),
            most_copies: 0,
        };
        device.cache = (0..limits.num_blocks).map(|_| device.rubbish()).collect();
        device.host = (0..limits.host_blocks).map(|_| device.rubbish()).collect();
        device
    }

    pub fn num_plans(&self) -> usize {
        self.plans.len()
    }

    pub fn submit(&mut self, plan: Box<StepPlan>) {
        assert!(self.plans.len() < DEPTH);
        assert_eq!(plan.step, self.last_step + 1);
        self.last_step = plan.step;
        self.most_copies = self.most_copies.max(plan.copies.len());
        let num_tokens: u32 = plan.work.iter().map(|work| work.num_tokens).sum();
        assert!(num_tokens >= 1 && num_tokens as usize <= self.limits.max_num_batched_tokens);
        let slots: HashSet<_> = plan.work.iter().map(|work| work.slot).collect();
        assert_eq!(slots.len(), plan.work.len(), "a slot has two rows");
        assert!(slots.iter().all(|slot| (*slot as usize) < self.limits.max_num_seqs));
        self.check_races(&plan);
        self.plans.push_back(plan);
    }

    /// Rows are computed side by side: what one writes, no other may read or write.
    fn check_races(&self, plan: &StepPlan) {
        let mut num_readers = HashMap::new();
        for work in &plan.work {
            let table = table(work, plan);
            let end = (work.start + work.num_tokens) as usize;
            assert_eq!(
                table.len(),
                end.div_ceil(self.limits.block_size),
                "the table does not end with the row"
            );
            assert!(table.iter().all(|block| *block < self.limits.num_blocks));
            table.iter().for_each(|block| *num_readers.entry(*block).or_insert(0) += 1);
        }
        for work in &plan.work {
            for block in &table(work, plan)[work.start as usize / self.limits.block_size..] {
                assert_eq!(num_readers[block], 1, "a block that is written is in two places");
            }
        }
    }

    /// Runs the oldest plan.
    pub fn complete(&mut self) -> StepDone {
        let mut plan = self.plans.pop_front().unwrap();
        self.make_copies(&mut plan);
        self.seat(&plan);
        for index in 0..plan.work.len() {
            self.run(index, &mut plan);
        }
        StepDone { plan, result: Ok(()) }
    }

    /// Fails the oldest plan, copies and all.
    pub fn fail(&mut self, text: &str) -> StepDone {
        let plan = self.plans.pop_front().unwrap();
        for copy in &plan.copies {
            match *copy {
                BlockCopy::Save { to, .. } => self.host[to.0 as usize] = self.rubbish(),
                BlockCopy::Load { to, .. } => self.cache[to.0 as usize] = self.rubbish(),
            }
        }
        self.spoil_work(&plan);
        StepDone { plan, result: Err(text.into()) }
    }

    /// Fails the oldest plan after its copies are made.
    pub fn fail_after_copies(&mut self, text: &str) -> StepDone {
        let mut plan = self.plans.pop_front().unwrap();
        self.make_copies(&mut plan);
        self.spoil_work(&plan);
        StepDone { plan, result: Err(text.into()) }
    }

    fn make_copies(&mut self, plan: &mut StepPlan) {
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
        plan.copied = true;
    }

    /// Nothing of any request is left here.
    pub fn forget_slots(&mut self) {
        self.slots.fill(None);
    }

    fn seat(&mut self, plan: &StepPlan) {
        for Seat { slot, request, generated } in &plan.seats {
            let generated = plan.tokens[generated.start as usize..generated.end as usize].to_vec();
            self.slots[*slot as usize] = Some((Arc::clone(request), generated));
        }
    }

    fn spoil_work(&mut self, plan: &StepPlan) {
        self.seat(plan);
        for work in &plan.work {
            if let (Some((_, generated)), Some(_)) = (&mut self.slots[work.slot as usize], work.sample) {
                generated.push(oracle::VOCABULARY);
            }
            let table = table(work, plan);
            for position in work.start as usize..(work.start + work.num_tokens) as usize {
                let rubbish = self.rubbish()[0];
                *self.cell(position, &table) = rubbish;
            }
        }
    }

    /// A block that nobody wrote: no two are alike.
    fn rubbish(&mut self) -> Block {
        self.num_rubbish += 1;
        vec![mix(!self.num_rubbish); self.limits.block_size]
    }

    fn cell(&mut self, position: usize, table: &[usize]) -> &mut u64 {
        let block_size = self.limits.block_size;
        &mut self.cache[table[position / block_size]][position % block_size]
    }

    fn run(&mut self, index: usize, plan: &mut StepPlan) {
        let work = plan.work[index].clone();
        let table = table(&work, plan);
        let given = &plan.tokens[work.tokens.start as usize..work.tokens.end as usize];
        let (request, generated) = self.slots[work.slot as usize].clone().expect("a row without a seat");
        let input = match work.follows_sample {
            true => {
                assert_eq!((given.len(), work.num_tokens), (0, 1));
                vec![*generated.last().expect("nothing was sampled to follow")]
            }
            false => given.to_vec(),
        };
        assert_eq!(input.len(), work.num_tokens as usize);
        let prompt_len = work.prompt_len as usize;
        for (position, token) in (work.start as usize..).zip(input) {
            let before = position.checked_sub(1).map(|before| *self.cell(before, &table));
            *self.cell(position, &table) = oracle::digest(before, position, token, prompt_len, &self.limits);
        }
        let end = (work.start + work.num_tokens) as usize;
        let Some(sample) = work.sample else { return plan.answers.push(Answer::default()) };
        assert_eq!(prompt_len, request.prompt.len());
        assert_eq!(sample.index as usize, end - prompt_len);
        assert_eq!(sample.index as usize, generated.len());
        assert!((sample.index as usize) < request.max_tokens, "a token too many is computed");
        assert!(end < self.limits.max_model_len, "a token beyond the model is computed");
        let read = (0..end).map(|position| *self.cell(position, &table));
        let suppress_stops = (sample.index as usize) < request.min_tokens;
        let token = oracle::sample(&request, sample.index, suppress_stops, read);
        let (_, generated) = self.slots[work.slot as usize].as_mut().expect("looked at above");
        generated.push(token.id);
        plan.sampled.push(token);
        plan.answers.push(Answer { num_tokens: 1, ..Answer::default() });
    }
}

fn table(work: &Work, plan: &StepPlan) -> Vec<usize> {
    let blocks = &plan.blocks[work.blocks.start as usize..work.blocks.end as usize];
    blocks.iter().map(|block| block.0 as usize).collect()
}
