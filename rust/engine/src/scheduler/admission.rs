//! Who gets a place, and when.
//!
//! Strictly in order: nobody overtakes who is ready, so a large one is never starved by small ones. The next gets its
//! place when there is a slot and blocks for all its tokens, less those the prefix cache lends, and a little headroom: a
//! block for each that runs already and is still to grow, so that nobody has to go again at once. A lone sequence needs
//! no headroom.
//!
//! If that lacks, those who would lose little make way: who is paused, for its consumer does not read, and who is less
//! urgent. They are not ended for that: they wait as whoever is preempted does.

use std::time::Instant;

use super::{Running, Scheduler, insert};
use crate::kv::Found;
use crate::request::CachedTokens;
use crate::sequence::Sequence;

/// Which queue the next in line waits in, and where.
#[derive(Clone, Copy)]
enum Line {
    Preempted(usize),
    Waiting,
}

impl Running {
    /// Whether it may come to need more blocks than it has or was promised.
    fn may_grow(&self) -> bool {
        self.blocks.blocks().len() + self.blocks.num_reserved() < self.sequence.blocks_needed
    }
}

impl Scheduler {
    /// Gives places to those who wait, in order, until the next has none.
    pub(super) fn admit(&mut self, now: Instant) {
        while let Some(line) = self.next_in_line() {
            if !self.seat(line, now) && !self.make_way(line, now) {
                break;
            }
        }
        self.admission_is_due = false;
    }

    /// Whoever has the least turn, leaving out those whose consumers do not read and those who only wait for their last
    /// tokens. Nobody, if rows of it are in flight: it was running a moment ago, and others do not overtake it for that.
    fn next_in_line(&self) -> Option<Line> {
        let wants_place = |sequence: &Sequence| !sequence.is_paused && !sequence.is_all_planned();
        let preempted = self.preempted.iter().position(wants_place).map(Line::Preempted);
        let waiting = (!self.waiting.is_empty()).then_some(Line::Waiting);
        let line = preempted.into_iter().chain(waiting).min_by_key(|line| self.in_line(*line).turn)?;
        self.in_line(line).is_settled().then_some(line)
    }

    fn in_line(&self, line: Line) -> &Sequence {
        match line {
            Line::Preempted(index) => &self.preempted[index],
            Line::Waiting => &self.waiting[0],
        }
    }

    /// Gives it a place, if there is one.
    fn seat(&mut self, line: Line, now: Instant) -> bool {
        let Some(&slot) = self.free_slots.last() else { return false };
        let (queue, index) = match line {
            Line::Preempted(index) => (&mut self.preempted, index),
            Line::Waiting => (&mut self.waiting, 0),
        };
        let sequence = &mut queue[index];
        let num_tokens = sequence.num_tokens();
        // The last token is always computed: something has to be sampled after it.
        let max_found = (num_tokens - 1) / self.block_size;
        let (chain, tokens) = sequence.contents();
        let may_share = chain.max_blocks() > 0;
        let Found { device, host } = self.memory.find(chain, tokens, max_found, now);
        let num_blocks = num_tokens.div_ceil(self.block_size);
        let headroom = self.slots.iter().flatten().filter(|running| running.may_grow()).count();
        let capacity = sequence.blocks_needed;
        let opened = self.memory.open(&mut sequence.saved, num_blocks, headroom, capacity);
        let Some((blocks, num_computed)) = opened else { return false };
        let mut sequence = queue.remove(index).expect("seen just now; this is a bug");
        let cached = CachedTokens { device: device * self.block_size, host: host * self.block_size };
        if sequence.take_place(num_computed, cached) && may_share {
            self.counters.prefix_query_tokens += sequence.request.prompt.len() as u64;
            self.counters.prefix_hit_tokens += (cached.device + cached.host) as u64;
            self.counters.prefix_host_hit_tokens += cached.host as u64;
        }
        let rank = self.order.partition_point(|slot| self.turn(*slot) < sequence.turn);
        self.free_slots.pop();
        self.order.insert(rank, slot);
        self.slots[slot as usize] = Some(Running { sequence, blocks, num_granted: 0 });
        true
    }

    /// Takes the place of one of those who make way for the next in line, if all of them together would make enough.
    fn make_way(&mut self, line: Line, now: Instant) -> bool {
        let Sequence { turn, .. } = *self.in_line(line);
        let num_blocks = self.in_line(line).num_tokens().div_ceil(self.block_size);
        let makes_way =
            |running: &&Running| running.sequence.is_paused || running.sequence.turn.priority > turn.priority;
        let running = self.slots.iter().flatten();
        // Who is paused first: it loses nothing by it.
        let key = |running: &Running| (running.sequence.is_paused, running.sequence.turn);
        let seated = self.order.iter().map(|slot| (*slot, self.seated(*slot)));
        let leaving = seated.filter(|(_, running)| makes_way(running));
        let Some((slot, _)) = leaving.max_by_key(|(_, running)| key(running)) else { return false };
        let headroom = running.clone().filter(|running| running.may_grow() && !makes_way(running)).count();
        let lists = running.filter(makes_way).map(|running| &running.blocks);
        let num_available = self.memory.pool().num_available() + self.memory.num_freed_by(lists);
        if num_blocks + headroom > num_available {
            return false;
        }
        self.preempt(slot, now);
        true
    }

    /// A running sequence has lost its place, with what is saved of it.
    pub(super) fn wait_again(&mut self, sequence: Sequence) {
        insert(&mut self.preempted, sequence);
        self.admission_is_due = true;
    }

    /// Panics if somebody waits beside a free place.
    pub(super) fn check_admission(&self) {
        let Some(next) = self.next_in_line().map(|line| self.in_line(line)) else { return };
        let num_blocks = next.num_tokens().div_ceil(self.block_size);
        let fits = num_blocks + self.order.len() <= self.memory.pool().num_available();
        let could_run = !self.free_slots.is_empty() && fits;
        assert!(!could_run || self.admission_is_due, "{} waits beside a free place; this is a bug", next.id);
    }
}
