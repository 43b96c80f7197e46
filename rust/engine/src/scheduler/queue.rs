//! The sequences that wait: new ones, preempted ones, paused ones, and those that wait for another choice of their
//! request.
//!
//! One of several choices for a prompt is their leader: it computes the prompt. The followers wait until it has, and
//! find the blocks of the prompt in the prefix cache then. They continue as preempted sequences do: they were admitted
//! with the leader, so they are not rejected.
//!
//! Sequences are found by key, and the next one through the order of the clients (`clients`), in logarithmic time: an
//! operation on one sequence does not visit the others. Only the end of unread sequences visits all paused ones.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::backlog::Backlog;
use super::clients::{Clients, lane_of};
use crate::request::AdapterId;
use crate::sequence::{SchedulingKey, Sequence};

/// Sequences in scheduling order.
type Waiting = BTreeMap<SchedulingKey, Sequence>;

/// All waiting sequences.
///
/// Invariants: a sequence is in `paused` exactly if it is paused; only sequences in `preempted` and `paused` have
/// swapped blocks or rows in flight; one choice of the request of every follower is no follower, and comes before it;
/// the lanes of `clients` have the keys in `new` and `preempted`.
#[derive(Default)]
pub(super) struct WaitingQueue {
    /// Requests that were never scheduled; at most `max_waiting`, or twice as many if several clients wait.
    new: Waiting,
    /// Sequences that were preempted, or admitted together with another one. They were admitted once and do not count
    /// against `max_waiting`.
    preempted: Waiting,
    /// Sequences that were preempted and whose consumers do not read.
    paused: Waiting,
    /// The choices that wait for their leader.
    followers: Waiting,
    /// The clients of all sequences, also of the running ones.
    pub(super) clients: Clients,
    /// The tokens of those in `new` that have deadlines.
    pub(super) backlog: Backlog,
    /// The number of those in `preempted` that were scheduled before.
    num_descheduled: usize,
    num_changes: u64,
    /// The number of sequences that operations have looked at.
    #[cfg(any(test, feature = "testing"))]
    num_visited: std::cell::Cell<u64>,
}

impl WaitingQueue {
    pub(super) fn len(&self) -> usize {
        self.new.len() + self.preempted.len() + self.paused.len() + self.followers.len()
    }

    /// The number of requests that were never scheduled.
    pub(super) fn num_new(&self) -> usize {
        self.new.len()
    }

    /// The number of sequences that were scheduled before, without the paused ones.
    pub(super) fn num_descheduled(&self) -> usize {
        self.num_descheduled
    }

    pub(super) fn num_paused(&self) -> usize {
        self.paused.len()
    }

    /// Counts the changes after which another sequence may be the next to run, or the same one may be ready. A new
    /// request does not count: [`next`](Self::next) tells whether it is the next.
    pub(super) fn num_changes(&self) -> u64 {
        self.num_changes
    }

    /// Adds a request that just arrived.
    pub(super) fn push_new(&mut self, sequence: Sequence) {
        self.clients.add_waiting(&sequence);
        self.clients.add_new(&sequence);
        self.new.insert(sequence.key, sequence);
    }

    /// Adds a sequence that was preempted or admitted with another one.
    pub(super) fn push_preempted(&mut self, sequence: Sequence) {
        self.visit();
        self.num_changes += 1;
        if sequence.is_paused() {
            self.paused.insert(sequence.key, sequence);
        } else {
            self.num_descheduled += usize::from(sequence.was_scheduled());
            self.clients.add_waiting(&sequence);
            self.preempted.insert(sequence.key, sequence);
        }
    }

    /// Adds a sequence that waits until its leader has computed their common prompt. The leader is here or runs, and
    /// all choices in between are followers.
    pub(super) fn push_follower(&mut self, mut sequence: Sequence) {
        sequence.is_follower = true;
        self.followers.insert(sequence.key, sequence);
    }

    /// Lets the followers of `leader` run, which has computed its prompt: they wait for nothing else.
    pub(super) fn release_followers(&mut self, leader: SchedulingKey) {
        while self.promote_follower(leader) {}
    }

    /// The sequence `leader`, which is no follower, has ended. If followers still wait for it, the first of them
    /// becomes the leader. Returns whether there was one.
    pub(super) fn promote_follower(&mut self, leader: SchedulingKey) -> bool {
        // The ids of a request's choices are consecutive.
        let next = self.followers.range(leader..).next();
        let Some((&key, _)) = next.filter(|(_, next)| next.first_choice() <= leader.id) else { return false };
        let mut sequence = self.followers.remove(&key).expect("it was just found; this is a bug");
        sequence.is_follower = false;
        self.push_preempted(sequence);
        true
    }

    /// The first in the order of clients, without the paused sequences and those that only wait for their last tokens.
    /// None while rows of it are in flight: it was preempted a moment ago, and no other overtakes it.
    pub(super) fn next(&self) -> Option<SchedulingKey> {
        self.first(|_| true)
    }

    /// The key of the next sequence among those with one of these adapters.
    pub(super) fn next_with(&self, adapters: &[Option<AdapterId>]) -> Option<SchedulingKey> {
        self.first(|adapter| adapters.contains(&adapter))
    }

    /// The adapters of the sequences that may be next.
    pub(super) fn adapters(&self) -> BTreeSet<AdapterId> {
        self.clients.adapters()
    }

    fn first(&self, is_wanted: impl Fn(Option<AdapterId>) -> bool) -> Option<SchedulingKey> {
        let first = self.clients.first(is_wanted, |key| self.is_schedulable(key));
        first.filter(|key| self.get(*key).has_no_rows_in_flight())
    }

    fn is_schedulable(&self, key: SchedulingKey) -> bool {
        self.visit();
        !self.get(key).is_all_planned()
    }

    /// The next sequence, which has this key.
    pub(super) fn get(&self, key: SchedulingKey) -> &Sequence {
        let next = self.new.get(&key).or_else(|| self.preempted.get(&key));
        next.expect("the key was just looked up; this is a bug")
    }

    /// The next sequence, which has this key.
    pub(super) fn get_mut(&mut self, key: SchedulingKey) -> &mut Sequence {
        let next = self.new.get_mut(&key).or_else(|| self.preempted.get_mut(&key));
        next.expect("the key was just looked up; this is a bug")
    }

    /// The sequence with this key, if it waits.
    pub(super) fn find(&mut self, key: SchedulingKey) -> Option<&mut Sequence> {
        self.visit();
        let queues = [&mut self.new, &mut self.preempted, &mut self.paused, &mut self.followers];
        queues.into_iter().find_map(|queue| queue.get_mut(&key))
    }

    /// Takes a sequence out, if it waits.
    pub(super) fn remove(&mut self, key: SchedulingKey) -> Option<Sequence> {
        self.visit();
        self.num_changes += 1;
        let removed = self.remove_new(key).or_else(|| self.remove_preempted(key));
        let removed = removed.inspect(|sequence| self.clients.remove_waiting(sequence));
        removed.or_else(|| self.paused.remove(&key)).or_else(|| self.followers.remove(&key))
    }

    fn remove_new(&mut self, key: SchedulingKey) -> Option<Sequence> {
        let mut sequence = self.new.remove(&key)?;
        self.clients.remove_new(&sequence);
        if let Some(num_tokens) = sequence.backlog_tokens.take() {
            self.backlog.remove(lane_of(&sequence), key.priority, num_tokens);
        }
        Some(sequence)
    }

    /// Counts the tokens of a request that was just found by `find_new`.
    pub(super) fn count_tokens(&mut self, key: SchedulingKey, num_tokens: u32) {
        let sequence = self.new.get_mut(&key).expect("it was just found; this is a bug");
        sequence.backlog_tokens = Some(num_tokens);
        self.backlog.add(lane_of(sequence), key.priority, num_tokens);
    }

    /// The request with this key, if it waits and was never scheduled.
    pub(super) fn find_new(&mut self, key: SchedulingKey) -> Option<&mut Sequence> {
        self.visit();
        self.new.get_mut(&key)
    }

    fn remove_preempted(&mut self, key: SchedulingKey) -> Option<Sequence> {
        let sequence = self.preempted.remove(&key)?;
        self.num_descheduled -= usize::from(sequence.was_scheduled());
        Some(sequence)
    }

    /// The key of any sequence. Followers first: they need no new leader when they end.
    pub(super) fn any(&self) -> Option<SchedulingKey> {
        let queues = [&self.followers, &self.new, &self.preempted, &self.paused];
        queues.into_iter().find_map(|queue| queue.keys().next().copied())
    }

    /// Pauses the next sequence, which has this key, if it was preempted and its result queue is full: it would lose
    /// its slot again without a token.
    pub(super) fn try_pause(&mut self, key: SchedulingKey, now: Instant) -> bool {
        let Some(sequence) = self.preempted.get_mut(&key) else { return false };
        if !sequence.needs_reader() || !sequence.try_pause(now) {
            return false;
        }
        let sequence = self.remove(key).expect("it was just found; this is a bug");
        self.push_preempted(sequence);
        true
    }

    /// Resumes a paused sequence if its consumer has read.
    pub(super) fn try_resume(&mut self, key: SchedulingKey) {
        if self.paused.get(&key).is_some_and(|sequence| !sequence.outbox.queue().is_armed()) {
            let mut sequence = self.paused.remove(&key).expect("it was just found; this is a bug");
            sequence.resume();
            self.push_preempted(sequence);
        }
    }

    /// The preempted sequences.
    pub(super) fn preempted_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.preempted.values_mut().chain(self.paused.values_mut())
    }

    /// The paused sequences.
    pub(super) fn paused(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.paused.values().inspect(|_| self.visit())
    }

    /// Notes that a preempted sequence was changed, so that it may be the next to run.
    pub(super) fn note_change(&mut self) {
        self.num_changes += 1;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        let queues = [&self.new, &self.preempted, &self.paused, &self.followers];
        queues.into_iter().flat_map(BTreeMap::values).inspect(|_| self.visit())
    }

    /// Counts a sequence that an operation looks at.
    fn visit(&self) {
        #[cfg(any(test, feature = "testing"))]
        self.num_visited.set(self.num_visited.get() + 1);
    }

    /// The number of sequences that operations have looked at so far.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn num_visited(&self) -> u64 {
        self.num_visited.get()
    }

    /// Panics unless the invariants hold and every follower has a leader, which waits or is `running`.
    pub(super) fn check_integrity<'a>(&'a self, running: impl Iterator<Item = &'a Sequence> + Clone) {
        self.iter().for_each(|sequence| sequence.check_integrity(false));
        let is_misplaced = |queue: &Waiting| queue.iter().any(|(key, sequence)| *key != sequence.key);
        let queues = [&self.new, &self.preempted, &self.paused, &self.followers];
        assert!(!queues.into_iter().any(is_misplaced), "a sequence has another key; this is a bug");
        let others = self.paused.values().chain(self.followers.values());
        self.clients.check_integrity(running.clone(), self.new.values(), self.preempted.values(), others);
        let counted = self.new.values().filter_map(|sequence| {
            Some((lane_of(sequence), sequence.key.priority, sequence.backlog_tokens?))
        });
        let unfinished = running.clone().chain(self.iter()).map(|sequence| &*sequence.prefix_hashes);
        self.backlog.check_integrity(counted, unfinished);
        let is_untouched =
            |sequence: &Sequence| sequence.has_no_rows_in_flight() && sequence.swapped.is_none();
        let mut untouched = self.new.values().chain(self.followers.values());
        assert!(untouched.all(is_untouched), "a sequence is in the wrong queue; this is a bug");
        let num_paused = self.iter().filter(|sequence| sequence.is_paused()).count();
        assert!(
            num_paused == self.paused.len() && self.paused.values().all(Sequence::is_paused),
            "a sequence is in the wrong queue; this is a bug"
        );
        let num_followers = self.iter().filter(|sequence| sequence.is_follower).count();
        assert!(
            num_followers == self.followers.len() && self.followers.values().all(|next| next.is_follower),
            "a sequence is in the wrong queue; this is a bug"
        );
        let descheduled = self.preempted.values().filter(|sequence| sequence.was_scheduled());
        assert_eq!(descheduled.count(), self.num_descheduled, "preempted ones miscounted; this is a bug");
        for follower in self.followers.values() {
            let waiting = self.iter().filter(|sequence| !sequence.is_follower);
            let mut others = running.clone().chain(waiting).map(Sequence::id);
            let before = follower.first_choice()..follower.id();
            assert!(others.any(|id| before.contains(&id)), "{} has no leader; this is a bug", follower.id());
        }
    }
}
