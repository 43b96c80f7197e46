//! A queue of several clients, which take turns.

use std::collections::VecDeque;

/// Items of clients. A client gives its oldest item at its turn; then it is the next client's turn.
pub(crate) struct Turns<T> {
    /// Never empty for a client.
    clients: VecDeque<(Option<u64>, VecDeque<T>)>,
    /// The client that had the last turn. If it has items, it is at the end.
    last: Option<Option<u64>>,
    len: usize,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { clients: VecDeque::new(), last: None, len: 0 }
    }
}

impl<T: PartialEq> Turns<T> {
    /// Number of items.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds an item. A client without items comes before the one that had the last turn, and after all others.
    pub(crate) fn push(&mut self, client: Option<u64>, item: T) {
        self.len += 1;
        match self.clients.iter_mut().find(|(id, _)| *id == client) {
            Some((_, items)) => items.push_back(item),
            None => {
                let is_last = |(id, _): &(Option<u64>, _)| Some(*id) == self.last;
                let index = self.clients.len() - usize::from(self.clients.back().is_some_and(is_last));
                self.clients.insert(index, (client, VecDeque::from([item])));
            }
        }
    }

    /// Takes the next item of a client that may have a turn.
    pub(crate) fn pop(&mut self, may_have: impl Fn(Option<u64>) -> bool) -> Option<T> {
        let index = self.clients.iter().position(|&(client, _)| may_have(client))?;
        let (client, mut items) = self.clients.remove(index)?;
        let item = items.pop_front()?;
        self.len -= 1;
        self.last = Some(client);
        if !items.is_empty() {
            self.clients.push_back((client, items));
        }
        Some(item)
    }

    /// Removes an item, if it is there.
    pub(crate) fn remove(&mut self, item: &T) {
        for (_, items) in &mut self.clients {
            if let Some(index) = items.iter().position(|other| other == item) {
                items.remove(index);
                self.len -= 1;
            }
        }
        self.clients.retain(|(_, items)| !items.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_take_turns() {
        let mut turns = Turns::default();
        for (client, item) in [(1, "a"), (1, "b"), (1, "c"), (2, "d"), (1, "e"), (3, "f"), (2, "g")] {
            turns.push(Some(client).filter(|&client| client != 3), item);
        }
        assert_eq!(turns.len(), 7);
        turns.remove(&"b");
        turns.remove(&"b");
        let order: Vec<_> = std::iter::from_fn(|| turns.pop(|_| true)).collect();
        assert_eq!(order, ["a", "d", "f", "c", "g", "e"]);
        assert_eq!(turns.len(), 0);
    }

    #[test]
    fn a_client_that_may_have_no_turn_keeps_its_place() {
        let mut turns = Turns::default();
        for (client, item) in [(1, "a"), (2, "b"), (2, "c"), (1, "d")] {
            turns.push(Some(client), item);
        }
        let without_first = |client| client != Some(1);
        assert_eq!(turns.pop(without_first), Some("b"));
        assert_eq!(turns.pop(without_first), Some("c"));
        assert_eq!(turns.pop(without_first), None);
        assert_eq!([turns.pop(|_| true), turns.pop(|_| true)], [Some("a"), Some("d")]);
        assert_eq!(turns.len(), 0);
    }

    #[test]
    fn a_new_client_comes_before_the_one_served_last() {
        let mut turns = Turns::default();
        for item in ["a1", "a2", "a3"] {
            turns.push(Some(1), item);
        }
        let mut order = Vec::new();
        for item in ["b1", "b2"] {
            order.extend(turns.pop(|_| true));
            turns.push(Some(2), item);
            order.extend(turns.pop(|_| true));
        }
        turns.push(None, "c1");
        turns.push(Some(2), "b3");
        order.extend(std::iter::from_fn(|| turns.pop(|_| true)));
        assert_eq!(order, ["a1", "b1", "a2", "b2", "a3", "c1", "b3"]);
    }

    #[test]
    fn a_client_without_items_has_no_turn() {
        let mut turns = Turns::default();
        turns.push(Some(1), 1);
        turns.push(Some(2), 2);
        turns.remove(&1);
        turns.push(Some(1), 3);
        let order: Vec<_> = std::iter::from_fn(|| turns.pop(|_| true)).collect();
        assert_eq!(order, [2, 3]);
    }
}
