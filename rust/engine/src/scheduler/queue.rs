//! The sequences that wait: new ones, preempted ones, and those that wait for another choice of their group.
//!
//! Several choices for one prompt form a group. Its leader computes the prompt; the followers wait until it has, and
//! find the blocks of the prompt in the prefix cache then. They continue as preempted sequences do: they were admitted
//! with the leader, so they are not rejected.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::request::RequestId;
use crate::sequence::{SchedulingKey, Sequence};

/// All waiting sequences.
///
/// Invariants: `new` and `preempted` are sorted by scheduling key; only sequences in `preempted` have swapped blocks or
/// rows in flight.
#[derive(Default)]
pub(super) struct WaitingQueue {
    /// Requests that were never scheduled; at most `max_waiting`.
    new: VecDeque<Sequence>,
    /// Sequences that were preempted, or admitted together with another one. They were admitted once and do not count
    /// against `max_waiting`.
    preempted: VecDeque<Sequence>,
    /// The choices of each group that wait for its leader, in scheduling order; at least one.
    groups: FxHashMap<RequestId, VecDeque<Sequence>>,
    /// The number of all followers.
    num_followers: usize,
    num_changes: u64,
}

/// The position of a sequence in the queue.
#[derive(Clone, Copy)]
pub(super) enum QueuePosition {
    /// The first of the new ones.
    New,
    Preempted(usize),
}

impl WaitingQueue {
    pub(super) fn len(&self) -> usize {
        self.new.len() + self.preempted.len() + self.num_followers
    }

    /// The number of requests that were never scheduled.
    pub(super) fn num_new(&self) -> usize {
        self.new.len()
    }

    /// The number of sequences that were scheduled before.
    pub(super) fn num_descheduled(&self) -> usize {
        self.preempted.iter().filter(|sequence| sequence.was_scheduled()).count()
    }

    /// Counts the changes after which another sequence may be the next to run, or the same one may be ready. A new
    /// request does not count: [`is_next`](Self::is_next) tells whether it is the next.
    pub(super) fn num_changes(&self) -> u64 {
        self.num_changes
    }

    /// Adds a request that just arrived.
    pub(super) fn push_new(&mut self, sequence: Sequence) {
        insert(&mut self.new, sequence);
    }

    /// Adds a sequence that was preempted or admitted with another one.
    pub(super) fn push_preempted(&mut self, sequence: Sequence) {
        insert(&mut self.preempted, sequence);
        self.num_changes += 1;
    }

    /// Adds a sequence that waits until the request `leader` has computed their common prompt.
    pub(super) fn push_follower(&mut self, leader: RequestId, sequence: Sequence) {
        self.groups.entry(leader).or_default().push_back(sequence);
        self.num_followers += 1;
    }

    /// The request `leader` has computed its prompt: its followers wait for nothing else.
    pub(super) fn release_followers(&mut self, leader: RequestId) {
        let Some(followers) = self.groups.remove(&leader) else { return };
        self.num_followers -= followers.len();
        followers.into_iter().for_each(|sequence| self.push_preempted(sequence));
    }

    /// The leaders that followers wait for.
    pub(super) fn leaders(&self) -> impl Iterator<Item = RequestId> {
        self.groups.keys().copied()
    }

    /// The request `leader` has ended. If followers still wait for it, the first of them becomes the leader.
    pub(super) fn promote_leader(&mut self, leader: RequestId) {
        let Some(mut followers) = self.groups.remove(&leader) else { return };
        let Some(sequence) = followers.pop_front() else { return };
        self.num_followers -= 1;
        if !followers.is_empty() {
            self.groups.insert(sequence.id, followers);
        }
        self.push_preempted(sequence);
    }

    /// The first in scheduling order, without the paused sequences and those that only wait for their last tokens. None
    /// while rows of it are in flight: it was preempted a moment ago, and no other overtakes it.
    pub(super) fn next(&self) -> Option<QueuePosition> {
        let is_schedulable = |sequence: &Sequence| !sequence.is_paused && !sequence.is_all_planned();
        let preempted = self.preempted.iter().position(is_schedulable).map(QueuePosition::Preempted);
        let new = (!self.new.is_empty()).then_some(QueuePosition::New);
        let next = preempted.into_iter().chain(new).min_by_key(|position| self.get(*position).key)?;
        self.get(next).has_no_rows_in_flight().then_some(next)
    }

    /// Whether the sequence with this key is the next.
    pub(super) fn is_next(&self, key: SchedulingKey) -> bool {
        self.next().is_some_and(|position| self.get(position).key == key)
    }

    pub(super) fn get(&self, position: QueuePosition) -> &Sequence {
        match position {
            QueuePosition::New => &self.new[0],
            QueuePosition::Preempted(index) => &self.preempted[index],
        }
    }

    pub(super) fn get_mut(&mut self, position: QueuePosition) -> &mut Sequence {
        match position {
            QueuePosition::New => &mut self.new[0],
            QueuePosition::Preempted(index) => &mut self.preempted[index],
        }
    }

    /// Takes a sequence out.
    pub(super) fn remove(&mut self, position: QueuePosition) -> Sequence {
        self.num_changes += 1;
        let removed = match position {
            QueuePosition::New => self.new.pop_front(),
            QueuePosition::Preempted(index) => self.preempted.remove(index),
        };
        removed.expect("the position was just looked up; this is a bug")
    }

    /// Takes a new request out.
    pub(super) fn remove_new(&mut self, key: SchedulingKey) -> Option<Sequence> {
        self.num_changes += 1;
        let index = self.new.binary_search_by_key(&key, |sequence| sequence.key).ok()?;
        self.new.remove(index)
    }

    /// Takes a preempted sequence out.
    pub(super) fn remove_preempted(&mut self, request: RequestId) -> Option<Sequence> {
        let index = self.preempted.iter().position(|sequence| sequence.id == request)?;
        Some(self.remove(QueuePosition::Preempted(index)))
    }

    /// Takes any sequence out.
    pub(super) fn pop_any(&mut self) -> Option<Sequence> {
        let waiting = self.new.pop_front().or_else(|| self.preempted.pop_front());
        waiting.or_else(|| {
            let leader = self.leaders().next()?;
            self.promote_leader(leader);
            self.preempted.pop_front()
        })
    }

    /// Takes out the sequences whose consumers have cancelled.
    pub(super) fn take_cancelled(&mut self, cancelled: &mut Vec<Sequence>) {
        let first = cancelled.len();
        take_cancelled(&mut self.new, cancelled);
        take_cancelled(&mut self.preempted, cancelled);
        self.groups.retain(|_, followers| {
            let num_followers = followers.len();
            take_cancelled(followers, cancelled);
            self.num_followers -= num_followers - followers.len();
            !followers.is_empty()
        });
        self.num_changes += u64::from(cancelled.len() > first);
    }

    /// Resumes the paused sequences whose consumers have read.
    pub(super) fn resume_paused(&mut self) {
        for sequence in self.preempted.iter_mut().filter(|sequence| sequence.is_paused) {
            sequence.is_paused = sequence.outbox.queue().is_armed();
            self.num_changes += u64::from(!sequence.is_paused);
        }
    }

    /// The sequence with this key; `leader` leads its group.
    pub(super) fn find(&mut self, key: SchedulingKey, leader: RequestId) -> Option<&mut Sequence> {
        let queues = [&mut self.new, &mut self.preempted].into_iter().chain(self.groups.get_mut(&leader));
        queues.into_iter().find_map(|queue| {
            let index = queue.binary_search_by_key(&key, |sequence| sequence.key).ok()?;
            queue.get_mut(index)
        })
    }

    /// The preempted sequence of a request.
    pub(super) fn find_preempted(&mut self, request: RequestId) -> Option<&mut Sequence> {
        self.preempted.iter_mut().find(|sequence| sequence.id == request)
    }

    /// The preempted sequences.
    pub(super) fn preempted_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.preempted.iter_mut()
    }

    /// A preempted sequence was changed so that it may be the next to run.
    pub(super) fn note_change(&mut self) {
        self.num_changes += 1;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.new.iter().chain(&self.preempted).chain(self.groups.values().flatten())
    }

    /// Panics unless the invariants hold and every follower has a leader, which waits or is `running`.
    pub(super) fn check_integrity(&self, running: impl Iterator<Item = RequestId> + Clone) {
        for queue in [&self.new, &self.preempted] {
            assert!(queue.iter().is_sorted_by_key(|sequence| sequence.key), "out of order; this is a bug");
        }
        self.iter().for_each(|sequence| sequence.check_integrity(false));
        let followers = self.groups.values().flatten();
        assert_eq!(followers.clone().count(), self.num_followers, "followers miscounted; this is a bug");
        let is_untouched =
            |sequence: &Sequence| sequence.has_no_rows_in_flight() && sequence.swapped.is_none();
        let mut untouched = self.new.iter().chain(followers);
        assert!(untouched.all(is_untouched), "a sequence is in the wrong queue; this is a bug");
        for (leader, followers) in &self.groups {
            assert!(
                followers.iter().is_sorted_by_key(|sequence| sequence.key),
                "out of order; this is a bug"
            );
            assert!(!followers.is_empty(), "an empty group was kept; this is a bug");
            let waiting = self.new.iter().chain(&self.preempted).map(|sequence| sequence.id);
            let mut leaders = running.clone().chain(waiting);
            assert!(leaders.any(|id| id == *leader), "{leader} has followers and ended; this is a bug");
        }
    }
}

/// Inserts a sequence by its key; at the end if it has the lowest priority and just arrived.
fn insert(queue: &mut VecDeque<Sequence>, sequence: Sequence) {
    let index = queue.partition_point(|other| other.key < sequence.key);
    queue.insert(index, sequence);
}

/// Looks at each flag once, since they may be raised meanwhile.
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
