//! Several answers to one prompt. One of them, the leader, computes it; the others are held back until it has, so that
//! they find the prompt's blocks in the prefix cache. Then they wait for places like those who lost theirs: they were
//! admitted with the leader, so nobody turns them away.

use super::{Scheduler, insert};
use crate::request::RequestId;
use crate::sequence::Sequence;

/// One that is held back.
pub(super) struct Held {
    /// Who computes the prompt.
    leader: RequestId,
    pub(super) sequence: Sequence,
}

impl Scheduler {
    /// Takes in one more answer to the prompt of `leader`, which was not turned away. It is held back if there is a
    /// block for it to find.
    pub(crate) fn add_choice(&mut self, leader: RequestId, sequence: Sequence) {
        if sequence.may_find_prefix() && sequence.num_reusable() >= self.block_size {
            self.held.push(Held { leader, sequence });
        } else {
            self.wait_again(sequence);
        }
    }

    /// The leader has computed the prompt.
    pub(crate) fn release_choices(&mut self, leader: RequestId) {
        for held in self.held.extract_if(.., |held| held.leader == leader) {
            insert(&mut self.preempted, held.sequence);
            self.admission_is_due = true;
        }
    }

    /// Some have paused, and who knows for how long: nobody waits for what a consumer does not read.
    pub(super) fn release_from_paused(&mut self) {
        let is_paused = |leader: RequestId| {
            let mut seated = self.slots.iter().flatten().map(|running| &running.sequence);
            seated.any(|sequence| sequence.id == leader && sequence.is_paused)
        };
        for held in self.held.extract_if(.., |held| is_paused(held.leader)) {
            insert(&mut self.preempted, held.sequence);
        }
    }

    /// The leader has ended. If that was too soon, the next one takes its place.
    pub(crate) fn succeed(&mut self, leader: RequestId) {
        let Some(next) = self.held.iter().position(|held| held.leader == leader) else { return };
        let Held { sequence, .. } = self.held.remove(next);
        for held in self.held.iter_mut().filter(|held| held.leader == leader) {
            held.leader = sequence.id;
        }
        self.wait_again(sequence);
    }

    /// Panics unless everybody who is held back waits for somebody.
    pub(super) fn check_choices(&self) {
        for Held { leader, sequence } in &self.held {
            sequence.check_integrity(None, self.block_size);
            let seated = self.occupied().map(|running| &running.sequence);
            let mut others = seated.chain(&self.waiting).chain(&self.preempted);
            assert!(
                others.any(|other| other.id == *leader),
                "{} waits for nobody; this is a bug",
                sequence.id
            );
        }
    }
}
