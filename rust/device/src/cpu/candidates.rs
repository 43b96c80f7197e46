//! The ids that may be drawn: a list in borrowed room for the whole vocabulary, so it never grows.

use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};

/// One id that may be drawn, with its share of the probability.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Candidate {
    pub id: u32,
    pub weight: f32,
}

/// The first `len` places of `room`.
#[derive(Debug)]
pub(super) struct Candidates<'a> {
    room: &'a mut [Candidate],
    len: usize,
}

impl<'a> Candidates<'a> {
    /// None yet. Each id is added at most once, so `room` has a place for each.
    pub fn new(room: &'a mut [Candidate]) -> Self {
        Self { room, len: 0 }
    }

    pub fn clear(&mut self) {
        self.len = 0;
    }

    pub fn extend(&mut self, candidates: impl Iterator<Item = Candidate>) {
        for candidate in candidates {
            self.room[self.len] = candidate;
            self.len += 1;
        }
    }

    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Drops those that are not to be kept; the others stay in order.
    pub fn retain(&mut self, keep: impl Fn(&Candidate) -> bool) {
        let mut kept = 0;
        for index in 0..self.len {
            let candidate = self.room[index];
            self.room[kept] = candidate;
            kept += usize::from(keep(&candidate));
        }
        self.len = kept;
    }
}

impl Deref for Candidates<'_> {
    type Target = [Candidate];

    fn deref(&self) -> &[Candidate] {
        &self.room[..self.len]
    }
}

impl DerefMut for Candidates<'_> {
    fn deref_mut(&mut self) -> &mut [Candidate] {
        &mut self.room[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_its_order_and_its_room() {
        let mut room = [Candidate::zeroed(); 5];
        let mut list = Candidates::new(&mut room);
        let five = || (0..5).map(|id| Candidate { id, weight: 0.5 });
        list.extend(five());
        list.retain(|candidate| candidate.id % 2 == 0);
        assert_eq!(list.iter().map(|candidate| candidate.id).collect::<Vec<_>>(), [0, 2, 4]);
        list.truncate(2);
        list.truncate(4);
        assert_eq!(list.len(), 2);
        list.clear();
        list.extend(five());
        assert_eq!(*list, five().collect::<Vec<_>>()[..]);
    }
}
