//! Who gets a place, and when.
//!
//! Strictly in order: nobody overtakes who is ready, so a large one is never starved by small ones. The next gets its
//! place when there is a slot and blocks for all its tokens, less those the prefix cache lends, and a little headroom: a
//! block for each that runs already and is still to grow, so that nobody has to go again at once. A lone sequence needs
//! no headroom.
//!
//! What a new place loads from the host is part of the next plan, and everybody in it waits for that. So a plan with other
//! work loads a bounded number of blocks: a long prefix comes over piece by piece, plan after plan, into blocks that
//! nobody holds, and its sequence gets its place with the last piece. Only what was saved of a sequence comes at once.
//!
//! If slots or blocks lack, those who would lose little make way: who is paused, for its consumer does not read, and who is less
//! urgent. They are not ended for that: they wait as whoever is preempted does.

use std::time::Instant;

use super::{Running, Scheduler, insert};
use crate::kv::Found;
use crate::request::CachedTokens;
use crate::sequence::{Sequence, Turn};

/// Which queue the next in line waits in, and where.
#[derive(Clone, Copy)]
enum Line {
    Preempted(usize),
    Waiting,
}

/// How much may be loaded for those who get places.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// As much as a plan with other work can bear.
    Bounded,
    /// All of it: nobody waits for the plan.
    AtOnce,
}

/// What comes of trying to give somebody a place.
enum Outcome {
    Seated,
    /// Slot or blocks lack.
    NoPlace,
    /// There is a place, but what it would load is too much for one plan.
    Loading,
}

impl Running {
    /// Whether it may come to need more blocks than it has or was promised.
    fn may_grow(&self) -> bool {
        self.blocks.blocks().len() + self.blocks.num_reserved() < self.sequence.blocks_needed
    }
}

impl Scheduler {
    /// Gives places to those who wait, in order, until the next has none.
    pub(super) fn admit(&mut self, mut pace: Pace, now: Instant) {
        self.is_loading = false;
        while let Some(line) = self.next_in_line() {
            match self.seat(line, pace, now) {
                Outcome::Seated => pace = Pace::Bounded,
                Outcome::NoPlace if self.make_way(line, now) => {}
                Outcome::NoPlace => break,
                Outcome::Loading => {
                    self.is_loading = true;
                    break;
                }
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

    /// Whether this turn is the next.
    pub(super) fn is_next(&self, turn: Turn) -> bool {
        self.next_in_line().is_some_and(|line| self.in_line(line).turn == turn)
    }

    fn in_line(&self, line: Line) -> &Sequence {
        match line {
            Line::Preempted(index) => &self.preempted[index],
            Line::Waiting => &self.waiting[0],
        }
    }

    /// Gives it a place, if there is one.
    fn seat(&mut self, line: Line, pace: Pace, now: Instant) -> Outcome {
        let Some(&slot) = self.free_slots.last() else { return Outcome::NoPlace };
        let (queue, index) = match line {
            Line::Preempted(index) => (&mut self.preempted, index),
            Line::Waiting => (&mut self.waiting, 0),
        };
        let sequence = &mut queue[index];
        let num_tokens = sequence.num_tokens();
        let max_found = sequence.num_reusable() / self.block_size;
        let num_blocks = num_tokens.div_ceil(self.block_size);
        let headroom = self.slots.iter().flatten().filter(|running| running.may_grow()).count();
        let capacity = sequence.blocks_needed;
        let may_find = sequence.may_find_prefix();
        let (chain, tokens) = sequence.contents();
        let pool = self.memory.pool();
        // Looking up costs as much as the sequence is long, so not where finding all that others hold would not do.
        let most_held = max_found.min(chain.max_blocks()).min(pool.num_used());
        if num_blocks - most_held + headroom > pool.num_available() {
            return Outcome::NoPlace;
        }
        let Found { device, host } = self.memory.find(chain, tokens, max_found, now);
        let num_loadable = if pace == Pace::Bounded { self.memory.num_loadable() } else { usize::MAX };
        if host > num_loadable || num_loadable == 0 && sequence.saved.is_some() {
            // A list that is given back at once leaves what it loaded in the prefix cache.
            let (chain, tokens) = sequence.contents();
            let Found { host, .. } = self.memory.find(chain, tokens, device + num_loadable, now);
            let opened = self.memory.open(&mut None, num_blocks, headroom, capacity);
            let Some((blocks, _)) = opened else { return Outcome::NoPlace };
            self.memory.give_back(blocks, now);
            sequence.num_brought_over += host;
            return Outcome::Loading;
        }
        let opened = self.memory.open(&mut sequence.saved, num_blocks, headroom, capacity);
        let Some((blocks, num_computed)) = opened else { return Outcome::NoPlace };
        let mut sequence = queue.remove(index).expect("seen just now; this is a bug");
        // What was brought over for it was found on the host, unless it had to go again meanwhile.
        let brought_over = sequence.num_brought_over.min(device);
        sequence.num_brought_over = 0;
        let (device, host) = (device - brought_over, host + brought_over);
        let cached = CachedTokens { device: device * self.block_size, host: host * self.block_size };
        if sequence.take_place(num_computed, cached) && may_find {
            self.counters.prefix_query_tokens += sequence.request.prompt.len() as u64;
            self.counters.prefix_hit_tokens += (cached.device + cached.host) as u64;
            self.counters.prefix_host_hit_tokens += cached.host as u64;
        }
        let rank = self.order.partition_point(|slot| self.turn(*slot) < sequence.turn);
        self.free_slots.pop();
        self.order.insert(rank, slot);
        self.slots[slot as usize] = Some(Running { sequence, blocks, num_granted: 0 });
        Outcome::Seated
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

    /// Somebody who was admitted waits for a place: it has lost one, with what is saved of it, or never had one and was
    /// not turned away.
    pub(super) fn wait_again(&mut self, sequence: Sequence) {
        insert(&mut self.preempted, sequence);
        self.admission_is_due = true;
    }

    /// Panics if somebody waits beside a free place.
    pub(super) fn check_admission(&self) {
        let Some(next) = self.next_in_line().map(|line| self.in_line(line)) else { return };
        let num_blocks = next.num_tokens().div_ceil(self.block_size);
        let fits = num_blocks + self.order.len() <= self.memory.pool().num_available();
        let could_run = !self.free_slots.is_empty() && fits && !self.is_loading;
        assert!(!could_run || self.admission_is_due, "{} waits beside a free place; this is a bug", next.id);
    }
}
