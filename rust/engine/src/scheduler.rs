//! Who has a place, and who computes how much in the next step.
//!
//! **Places.** A sequence runs when it has a slot and the promise of every block it can ever need. Waiting sequences
//! get places strictly in their order: nobody overtakes, so a large one is never starved by small ones, and since
//! running sequences end by themselves, everybody's turn comes.
//!
//! **A step's budget** of `max_num_batched_tokens` goes, by one rule for all, to the tokens running sequences have
//! pending:
//!
//! 1. Every sequence with a single pending token gets it. There are at most `max_num_seqs` of them, which the limits
//!    keep within the budget: a stream advances in every step, whatever prompts arrive.
//! 2. Of what is left, the sequence admitted first among the others gets half (rounded up): a long prompt cannot be
//!    starved by a stream of short ones, since everyone in turn becomes the first.
//! 3. The rest goes to the others, fewest pending tokens first: a short prompt does not queue behind a long one, and on
//!    average the first tokens come as early as can be. What they leave, the first gets too: no budget is wasted.
//!
//! Decoding, a chunk of a prompt, and recomputing after a lost place are all "pending tokens"; there are no phases.

use std::collections::VecDeque;
use std::time::Instant;

use crate::executor::StepPlan;
use crate::kv::{BlockList, BlockPool};
use crate::limits::Limits;
use crate::request::RequestId;
use crate::sequence::Sequence;

/// Owns every sequence and every block.
///
/// Invariants: a slot is in `free_slots` or in `order`, and occupied in `slots` exactly if in `order`; the block lists
/// of running sequences are all lists of the pool; whoever waits first lacks a slot or blocks.
pub struct Scheduler {
    block_size: usize,
    max_num_batched_tokens: usize,
    max_waiting: usize,
    pool: BlockPool,
    waiting: VecDeque<Sequence>,
    slots: Vec<Option<Running>>,
    free_slots: Vec<u32>,
    /// Occupied slots, in the order of admission.
    order: Vec<u32>,
    num_paused: usize,
    /// Scratch of `plan`: sequences with more than one pending token.
    behind: Vec<Behind>,
}

/// A sequence with a place; its slot is its index.
struct Running {
    sequence: Sequence,
    blocks: BlockList,
}

/// Ordered by fewest pending tokens, then by admission.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Behind {
    num_pending: usize,
    rank: usize,
    slot: u32,
}

impl Scheduler {
    /// Everything free. `limits` have been validated.
    pub(crate) fn new(limits: &Limits) -> Self {
        let slots = limits.max_num_seqs;
        Self {
            block_size: limits.block_size,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_waiting: limits.max_waiting,
            pool: BlockPool::new(limits.num_blocks),
            waiting: VecDeque::new(),
            slots: (0..slots).map(|_| None).collect(),
            free_slots: (0..slots as u32).rev().collect(),
            order: Vec::with_capacity(slots),
            num_paused: 0,
            behind: Vec::with_capacity(slots),
        }
    }

    /// Takes a sequence in, to run at once if there is a place and to wait otherwise. If as many wait as may, it is
    /// turned away: returned.
    #[must_use]
    pub(crate) fn enqueue(&mut self, sequence: Sequence) -> Option<Sequence> {
        self.waiting.push_back(sequence);
        self.admit();
        if self.waiting.len() > self.max_waiting {
            return self.waiting.pop_back();
        }
        None
    }

    /// Gives places to those who wait, in order, until the next has none.
    fn admit(&mut self) {
        while let Some(next) = self.waiting.front()
            && let Some(&slot) = self.free_slots.last()
            && let Some(blocks) = self.pool.open(next.blocks_needed)
        {
            let sequence = self.waiting.pop_front().expect("just seen; this is a bug");
            self.free_slots.pop();
            self.order.push(slot);
            self.slots[slot as usize] = Some(Running { sequence, blocks });
        }
    }

    /// Fills an empty plan with the next step's rows, and `owners` with whose they are. Leaves it empty if nothing can
    /// be computed now.
    pub(crate) fn plan(&mut self, plan: &mut StepPlan, owners: &mut Vec<RequestId>, now: Instant) {
        let mut budget = self.max_num_batched_tokens;
        self.behind.clear();
        self.num_paused = 0;
        for rank in 0..self.order.len() {
            let slot = self.order[rank];
            let sequence = &mut self.running(slot).sequence;
            let num_pending = sequence.num_pending();
            self.num_paused += usize::from(sequence.is_paused);
            match num_pending {
                0 => {}
                1 => {
                    self.add_row(slot, 1, plan, owners, now);
                    budget -= 1;
                }
                _ => self.behind.push(Behind { num_pending, rank, slot }),
            }
        }
        let Some((first, others)) = self.behind.split_first_mut() else { return };
        let first = *first;
        let set_aside = first.num_pending.min(budget.div_ceil(2));
        let mut shared = budget - set_aside;
        others.sort_unstable();
        for index in 1..self.behind.len() {
            let Behind { num_pending, slot, .. } = self.behind[index];
            let granted = num_pending.min(shared);
            shared -= granted;
            self.add_row(slot, granted, plan, owners, now);
        }
        self.add_row(first.slot, first.num_pending.min(set_aside + shared), plan, owners, now);
    }

    fn add_row(
        &mut self,
        slot: u32,
        num_tokens: usize,
        plan: &mut StepPlan,
        owners: &mut Vec<RequestId>,
        now: Instant,
    ) {
        if num_tokens == 0 {
            return;
        }
        let Running { sequence, blocks } =
            self.slots[slot as usize].as_mut().expect("a slot in the order is occupied; this is a bug");
        let end = sequence.num_planned() + num_tokens;
        self.pool.grow(blocks, end.div_ceil(self.block_size));
        sequence.plan(slot, num_tokens, blocks.blocks(), plan, now);
        owners.push(sequence.id);
    }

    /// The sequence that owns a row, unless it has ended since: its slot may be empty or another's by now.
    pub(crate) fn owner(&mut self, slot: u32, id: RequestId) -> Option<&mut Sequence> {
        let running = self.slots[slot as usize].as_mut()?;
        (running.sequence.id == id).then_some(&mut running.sequence)
    }

    /// Takes a running sequence out; its slot and blocks are free, and those who wait get them at once. Rows of it that
    /// are still in flight do no harm: plans run in order, so whatever they write is written before a plan submitted
    /// from now on writes there, and nobody reads a position that he has not written himself.
    pub(crate) fn retire(&mut self, slot: u32) -> Sequence {
        let sequence = self.vacate(slot);
        self.admit();
        sequence
    }

    fn vacate(&mut self, slot: u32) -> Sequence {
        let running = self.slots[slot as usize].take().expect("only running sequences retire; this is a bug");
        self.pool.give_back(running.blocks);
        self.num_paused -= usize::from(running.sequence.is_paused);
        self.order.retain(|other| *other != slot);
        self.free_slots.push(slot);
        running.sequence
    }

    /// Looks at the flags consumers have raised: moves every cancelled sequence to `cancelled`, and lets those run
    /// again whose consumers have read.
    pub(crate) fn attend(&mut self, cancelled: &mut Vec<Sequence>) {
        for rank in (0..self.order.len()).rev() {
            let slot = self.order[rank];
            let sequence = &mut self.running(slot).sequence;
            if sequence.outbox.is_cancelled() {
                cancelled.push(self.vacate(slot));
            } else if sequence.is_paused && !sequence.outbox.writer().is_armed() {
                sequence.is_paused = false;
                self.num_paused -= 1;
            }
        }
        if self.waiting.iter().any(|sequence| sequence.outbox.is_cancelled()) {
            // Flags go up while we look, so each is looked at once here.
            for _ in 0..self.waiting.len() {
                let sequence = self.waiting.pop_front().expect("counted just now; this is a bug");
                match sequence.outbox.is_cancelled() {
                    true => cancelled.push(sequence),
                    false => self.waiting.push_back(sequence),
                }
            }
        }
        self.admit();
    }

    /// Takes out any sequence, for as long as there are some. Nobody gets the places.
    pub(crate) fn evict(&mut self) -> Option<Sequence> {
        match self.order.last() {
            Some(&slot) => Some(self.vacate(slot)),
            None => self.waiting.pop_front(),
        }
    }

    /// The sequence that was enqueued last, right after that.
    pub(crate) fn newest(&mut self) -> &mut Sequence {
        if self.waiting.is_empty() {
            let slot = *self.order.last().expect("it runs if it does not wait; this is a bug");
            return &mut self.running(slot).sequence;
        }
        self.waiting.back_mut().expect("just seen; this is a bug")
    }

    fn running(&mut self, slot: u32) -> &mut Running {
        self.slots[slot as usize].as_mut().expect("a slot in the order is occupied; this is a bug")
    }

    pub(crate) fn num_running(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn num_paused(&self) -> usize {
        self.num_paused
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    fn occupied(&self) -> impl Iterator<Item = &Running> {
        self.slots.iter().flatten()
    }

    /// Panics unless slots, order, sequences and blocks agree.
    pub(crate) fn check_integrity(&self) {
        let mut places: Vec<u32> = self.order.iter().chain(&self.free_slots).copied().collect();
        places.sort_unstable();
        assert!(
            places.iter().copied().eq(0..self.slots.len() as u32),
            "slots lost or doubled; this is a bug: {places:?}"
        );
        assert!(!places.is_empty(), "nothing was checked; this is a bug");
        for &slot in &self.order {
            assert!(self.slots[slot as usize].is_some(), "slot {slot} runs nothing; this is a bug");
        }
        assert_eq!(self.occupied().count(), self.order.len(), "somebody runs without a turn; this is a bug");
        let num_paused = self.occupied().filter(|running| running.sequence.is_paused).count();
        assert_eq!(num_paused, self.num_paused, "pauses miscounted; this is a bug");
        for Running { sequence, blocks } in self.occupied() {
            sequence.check_integrity(Some(blocks), self.block_size);
        }
        for sequence in &self.waiting {
            sequence.check_integrity(None, self.block_size);
        }
        self.pool.check_integrity(self.occupied().map(|running| &running.blocks));
        assert!(self.waiting.len() <= self.max_waiting, "too many wait; this is a bug");
        if let Some(next) = self.waiting.front() {
            let available = self.pool.num_blocks() - self.pool.num_used() - self.pool.num_reserved();
            let could_run = !self.free_slots.is_empty() && next.blocks_needed <= available;
            assert!(!could_run, "{} waits beside a free place; this is a bug", next.id);
        }
    }
}
