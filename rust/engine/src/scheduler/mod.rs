//! Who has a place, and who computes how much in the next step.
//!
//! There is one order, of [`Turn`]s: by priority, then by arrival. Places are given in it (`admission`), tokens of a step
//! are shared out along it (`budget`), and blocks go to the first in it at the cost of the last (`preemption`). A place
//! is a slot and the blocks of the tokens a sequence has; those of the tokens still to come are taken one at a time.
//!
//! Why everybody ends: whoever is first in the order, of those whose consumers read, gets every block it asks for, since
//! the others give theirs up one by one, and alone it fits, as was checked when it came. So it is computed in every step
//! until it ends, whatever happens to the others, and then somebody else is first.
//!
//! Of several answers to one prompt one computes it for all (`choices`).
//!
//! What then is left of a step goes to drafts (`drafting`). Decoding, a chunk of a prompt, and recomputing after a lost
//! place are all "pending tokens"; there are no phases.

mod admission;
mod budget;
mod choices;
mod drafting;
mod preemption;

use std::collections::VecDeque;
use std::time::Instant;

use crate::drafts::MAX_FORCED;
use crate::executor::{ScheduledRow, StepPlan};
use crate::kv::{BlockList, Memory};
use crate::limits::{Limits, PreemptionMode};
use crate::prefix::BlockHasher;
use crate::request::RequestId;
use crate::sequence::{Computed, Sequence, Turn};
use crate::stats::Stats;
use admission::Pace;
use budget::Behind;
use choices::Held;

/// Owns every sequence and every block.
///
/// Invariants: a slot is in `free_slots` or in `order`, and occupied in `slots` exactly if in `order`; `order` and both
/// queues are sorted by turn; the block lists of running sequences are all lists there are; only sequences in
/// `preempted` have saved blocks, or rows in flight without a place; whoever waits first lacks a slot or blocks, unless
/// `admission_is_due` or `is_loading`.
pub struct Scheduler {
    block_size: usize,
    max_num_batched_tokens: usize,
    max_waiting: usize,
    preemption_mode: PreemptionMode,
    memory: Memory,
    /// Those that never had a place.
    waiting: VecDeque<Sequence>,
    /// Those that lost theirs, or were admitted together with another; not counted against `max_waiting`, for they were
    /// admitted once. New ones are turned away while so many have lost theirs that consumers which never read would pile
    /// them up.
    preempted: VecDeque<Sequence>,
    /// Those that wait for another to compute their prompt, and are in no queue.
    held: Vec<Held>,
    slots: Vec<Option<Running>>,
    free_slots: Vec<u32>,
    /// Slots that were left since the last plan, each once, though others may have got them.
    vacated: Vec<u32>,
    /// Occupied slots, by turn.
    order: Vec<u32>,
    num_paused: usize,
    /// Something has changed since the last attempt that may help those who wait.
    admission_is_due: bool,
    /// Whoever is next has more to load than one plan may: the next plan goes on with it.
    is_loading: bool,
    /// Those who were ended to make room, for the core to say so.
    interrupted: Vec<Sequence>,
    /// The counters of the engine; its gauges are zero here.
    pub(crate) counters: Stats,
    /// Whether the last plan had budget left for drafts.
    has_draft_room: bool,
    /// Scratch of `share_out`: sequences with more than one pending token.
    behind: Vec<Behind>,
    /// Scratch of `add_rows`: drafts of one row.
    drafts: Vec<u32>,
}

/// A sequence with a place; its slot is its index.
struct Running {
    sequence: Sequence,
    blocks: BlockList,
    /// Tokens it computes in the plan that is being made.
    num_granted: usize,
}

impl Scheduler {
    /// Everything free. `limits` have been validated.
    pub(crate) fn new(limits: &Limits, hasher: BlockHasher) -> Self {
        let slots = limits.max_num_seqs;
        Self {
            block_size: limits.block_size,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_waiting: limits.max_waiting,
            preemption_mode: limits.preemption_mode,
            memory: Memory::new(limits, hasher),
            waiting: VecDeque::new(),
            preempted: VecDeque::new(),
            held: Vec::new(),
            slots: (0..slots).map(|_| None).collect(),
            free_slots: (0..slots as u32).rev().collect(),
            vacated: Vec::with_capacity(slots),
            order: Vec::with_capacity(slots),
            num_paused: 0,
            admission_is_due: false,
            is_loading: false,
            interrupted: Vec::new(),
            counters: Stats::default(),
            has_draft_room: true,
            behind: Vec::with_capacity(slots),
            drafts: Vec::with_capacity(limits.num_speculative_tokens.max(MAX_FORCED)),
        }
    }

    /// Takes a sequence in, to run at once if there is a place and to wait otherwise. If as many wait as may, it is
    /// turned away: returned.
    #[must_use]
    pub(crate) fn enqueue(&mut self, sequence: Sequence, now: Instant) -> Option<Sequence> {
        let have_lost_places = self.preempted.iter().filter(|sequence| sequence.has_had_place()).count();
        if self.waiting.len() + have_lost_places >= self.max_waiting.saturating_add(self.slots.len()) {
            return Some(sequence);
        }
        let turn = sequence.turn;
        insert(&mut self.waiting, sequence);
        // Behind somebody who lacks a place it has none either: the others are not looked at again for it.
        if self.admission_is_due || self.is_next(turn) {
            self.admit(Pace::Bounded, now);
        }
        if self.waiting.len() > self.max_waiting {
            // Nobody has left the queue, this one neither; others may have stood behind it in vain.
            self.admission_is_due = true;
            let index = self.waiting.binary_search_by_key(&turn, |sequence| sequence.turn);
            return index.ok().and_then(|index| self.waiting.remove(index));
        }
        None
    }

    /// Fills an empty plan with the next step's rows, and `owners` with whose they are. Leaves it empty if nothing can
    /// be computed now; copies then wait for a plan with the work that needs them, and so does what slots were left.
    pub(crate) fn plan(&mut self, plan: &mut StepPlan, owners: &mut Vec<RequestId>, now: Instant) {
        self.admission_is_due |= self.is_loading;
        self.share_out();
        while self.admission_is_due {
            self.admit(if self.has_work() { Pace::Bounded } else { Pace::AtOnce }, now);
            self.share_out(); // among more; some of them may pause at once, and make way again
            self.admission_is_due |= self.is_loading && !self.has_work(); // who had work has made way
        }
        self.make_room(now);
        self.add_rows(plan, owners, now);
        if !plan.rows.is_empty() {
            self.memory.submit(plan);
            let is_seated = |slot: &u32| plan.new_sequences.iter().any(|seat| seat.slot == *slot);
            plan.freed_slots.extend(self.vacated.drain(..).filter(|slot| !is_seated(slot)));
        }
    }

    /// Whether anybody computes anything in the plan that is being made.
    fn has_work(&self) -> bool {
        self.occupied().any(|running| running.num_granted > 0)
    }

    /// The sequence that a row in flight belongs to, unless it has ended: then the row is nobody's. It may have lost its
    /// place while the row was in flight; it is given no other before that is answered.
    pub(crate) fn owner(&mut self, slot: u32, owner: RequestId) -> Option<&mut Sequence> {
        let is_owner = |sequence: &&mut Sequence| sequence.id == owner;
        let seated = self.slots[slot as usize].as_mut().map(|running| &mut running.sequence);
        seated.filter(is_owner).or_else(|| self.preempted.iter_mut().find(is_owner))
    }

    /// Books a row that was computed, once its sequence has what came of it: publishes its full blocks if the sequence
    /// still has its place.
    pub(crate) fn row_computed(&mut self, work: &ScheduledRow, owner: RequestId, now: Instant) -> Computed {
        let running = self.slots[work.slot as usize].as_mut().filter(|running| running.sequence.id == owner);
        if let Some(Running { sequence, blocks, .. }) = running {
            let computed = sequence.row_computed(work);
            let num_blocks = sequence.num_planned().div_ceil(self.block_size);
            if work.num_drafts > 0 && self.memory.shrink(blocks, num_blocks) {
                self.admission_is_due = true;
            }
            let (chain, tokens) = sequence.contents();
            self.admission_is_due |= self.memory.publish(blocks, chain, tokens, computed.end, now);
            return computed;
        }
        let sequence = self.owner(work.slot, owner).expect("somebody's row is booked; this is a bug");
        let computed = sequence.row_computed(work);
        self.admission_is_due |= sequence.is_settled();
        computed
    }

    /// Takes out the sequence that owns a row, wherever it is, unless it has ended; what it held is free. Nobody gets it
    /// before the next plan: the step may have more to tell, of the rows that follow.
    pub(crate) fn retire(&mut self, slot: u32, owner: RequestId, now: Instant) -> Option<Sequence> {
        let running = self.slots[slot as usize].as_ref();
        if running.is_some_and(|running| running.sequence.id == owner) {
            return Some(self.vacate(slot, now));
        }
        let index = self.preempted.iter().position(|sequence| sequence.id == owner)?;
        let sequence = self.preempted.remove(index);
        sequence.map(|sequence| self.leave_queue(sequence))
    }

    /// Takes a running sequence out. Rows of it that are still in flight do no harm: plans run in order, so whatever
    /// they write is written before a plan submitted from now on writes there, and nobody reads a position that he has
    /// not written himself or found published.
    fn vacate(&mut self, slot: u32, now: Instant) -> Sequence {
        let Running { sequence, blocks, .. } = self.unseat(slot);
        self.memory.give_back(blocks, now);
        sequence
    }

    /// Frees a slot; its blocks are still to be given back.
    fn unseat(&mut self, slot: u32) -> Running {
        let running = self.slots[slot as usize].take().expect("only running sequences leave; this is a bug");
        self.num_paused -= usize::from(running.sequence.is_paused);
        self.order.retain(|other| *other != slot);
        self.free_slots.push(slot);
        if !self.vacated.contains(&slot) {
            self.vacated.push(slot);
        }
        self.admission_is_due = true;
        running
    }

    /// A sequence has been taken out of a queue for good.
    fn leave_queue(&mut self, mut sequence: Sequence) -> Sequence {
        if let Some(saved) = sequence.saved.take() {
            self.memory.discard(saved);
        }
        self.admission_is_due = true;
        sequence
    }

    /// Looks at the flags consumers have raised: moves every cancelled sequence to `cancelled`, and lets those run
    /// again whose consumers have read.
    pub(crate) fn attend(&mut self, cancelled: &mut Vec<Sequence>, now: Instant) {
        for rank in (0..self.order.len()).rev() {
            let slot = self.order[rank];
            let sequence = &mut self.running(slot).sequence;
            if sequence.outbox.is_cancelled() {
                cancelled.push(self.vacate(slot, now));
            } else if sequence.is_paused && !sequence.outbox.writer().is_armed() {
                sequence.is_paused = false;
                self.num_paused -= 1;
            }
        }
        for sequence in self.preempted.iter_mut().filter(|sequence| sequence.is_paused) {
            sequence.is_paused = sequence.outbox.writer().is_armed();
            self.admission_is_due |= !sequence.is_paused;
        }
        let first = cancelled.len();
        take_cancelled(&mut self.waiting, cancelled);
        take_cancelled(&mut self.preempted, cancelled);
        let is_cancelled = |held: &mut Held| held.sequence.outbox.is_cancelled();
        cancelled.extend(self.held.extract_if(.., is_cancelled).map(|held| held.sequence));
        self.admission_is_due |= cancelled.len() > first;
        for sequence in &mut cancelled[first..] {
            if let Some(saved) = sequence.saved.take() {
                self.memory.discard(saved);
            }
        }
        if self.admission_is_due {
            self.admit(Pace::Bounded, now);
        }
    }

    /// Takes out any sequence, for as long as there are some. Nobody gets the places.
    pub(crate) fn dismiss(&mut self, now: Instant) -> Option<Sequence> {
        if let Some(&slot) = self.order.last() {
            return Some(self.vacate(slot, now));
        }
        let waiting = self.waiting.pop_front().or_else(|| self.preempted.pop_front());
        let sequence = waiting.or_else(|| self.held.pop().map(|held| held.sequence));
        sequence.map(|sequence| self.leave_queue(sequence))
    }

    /// A sequence that was ended to make room, for as long as there are some.
    pub(crate) fn pop_interrupted(&mut self) -> Option<Sequence> {
        self.interrupted.pop()
    }

    /// Forgets the prefixes that nobody has used for too long.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.memory.expire(now);
    }

    /// Forgets all prefixes.
    pub(crate) fn reset_prefix_cache(&mut self) {
        self.memory.flush();
    }

    /// The sequence that has just arrived as the so-manyeth, and was not turned away.
    pub(crate) fn newcomer(&mut self, arrival: u64) -> &mut Sequence {
        let seated = self.slots.iter_mut().flatten().map(|running| &mut running.sequence);
        let held = self.held.iter_mut().map(|held| &mut held.sequence);
        let waiting = self.waiting.iter_mut().rev();
        let mut all = seated.chain(waiting).chain(&mut self.preempted).chain(held);
        all.find(|sequence| sequence.turn.arrival == arrival).expect("it is somewhere; this is a bug")
    }

    fn running(&mut self, slot: u32) -> &mut Running {
        self.slots[slot as usize].as_mut().expect("a slot in the order is occupied; this is a bug")
    }

    fn turn(&self, slot: u32) -> Turn {
        self.seated(slot).sequence.turn
    }

    fn seated(&self, slot: u32) -> &Running {
        self.slots[slot as usize].as_ref().expect("a slot in the order is occupied; this is a bug")
    }

    pub(crate) fn num_running(&self) -> usize {
        self.order.len()
    }

    /// All who wait.
    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len() + self.preempted.len() + self.held.len()
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The counters, and the gauges of this moment.
    pub(crate) fn stats(&self) -> Stats {
        let (pool, host) = (self.memory.pool(), self.memory.host());
        Stats {
            running: self.num_running() as u64,
            waiting: self.num_waiting() as u64,
            paused: self.num_paused as u64,
            blocks_total: pool.num_blocks() as u64,
            blocks_used: pool.num_used() as u64,
            blocks_cached: pool.num_kept() as u64,
            blocks_reserved: pool.num_reserved() as u64,
            host_blocks_total: host.num_blocks() as u64,
            host_blocks_used: (host.num_blocks() - host.num_free()) as u64,
            ..self.counters
        }
    }

    fn occupied(&self) -> impl Iterator<Item = &Running> + Clone {
        self.slots.iter().flatten()
    }

    /// Panics unless slots, order, queues, sequences and blocks agree.
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
        assert!(self.order.is_sorted_by_key(|slot| self.turn(*slot)), "out of order; this is a bug");
        assert_eq!(self.occupied().count(), self.order.len(), "somebody runs without a turn; this is a bug");
        let num_paused = self.occupied().filter(|running| running.sequence.is_paused).count();
        assert_eq!(num_paused, self.num_paused, "pauses miscounted; this is a bug");
        for Running { sequence, blocks, .. } in self.occupied() {
            sequence.check_integrity(Some(blocks), self.block_size);
        }
        for queue in [&self.waiting, &self.preempted] {
            assert!(queue.iter().is_sorted_by_key(|sequence| sequence.turn), "out of order; this is a bug");
            queue.iter().for_each(|sequence| sequence.check_integrity(None, self.block_size));
        }
        let is_new = |sequence: &Sequence| sequence.is_settled() && sequence.saved.is_none();
        assert!(self.waiting.iter().all(is_new), "somebody waits anew; this is a bug");
        assert!(self.interrupted.is_empty(), "somebody was not told of his end; this is a bug");
        let saved = self.preempted.iter().filter_map(|sequence| sequence.saved.as_ref());
        self.memory.check_integrity(self.occupied().map(|running| &running.blocks), saved);
        assert!(self.waiting.len() <= self.max_waiting, "too many wait; this is a bug");
        self.check_choices();
        self.check_admission();
    }
}

/// Puts a sequence where its turn is; for an arrival of the lowest urgency that is the end.
fn insert(queue: &mut VecDeque<Sequence>, sequence: Sequence) {
    let index = queue.partition_point(|other| other.turn < sequence.turn);
    queue.insert(index, sequence);
}

/// Flags go up while we look, so each is looked at once here.
fn take_cancelled(queue: &mut VecDeque<Sequence>, cancelled: &mut Vec<Sequence>) {
    if !queue.iter().any(|sequence| sequence.outbox.is_cancelled()) {
        return;
    }
    for _ in 0..queue.len() {
        let sequence = queue.pop_front().expect("counted just now; this is a bug");
        match sequence.outbox.is_cancelled() {
            true => cancelled.push(sequence),
            false => queue.push_back(sequence),
        }
    }
}
