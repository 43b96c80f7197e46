//! The clients of the engine, and the order in which their sequences wait.
//!
//! Clients that compete get the same number of slots; the number of their sequences does not matter. Of the waiting
//! sequences of one priority, the next is of the client with the fewest running sequences; of several such clients, of
//! the one that got a slot least recently. A client that arrives comes before the one that got a slot last, and after
//! the others: clients that come again and again do not pass one that waits. The sequences of a client stay in
//! scheduling order. The order depends on what runs now and not on what was computed before, so a client has no debt,
//! and the length of its sequences does not matter. Requests without a client are those of one client.
//!
//! A bound on requests holds for all clients together. At the bound, a client that has less than its share of it may
//! still have requests, until there are twice as many: a client that fills a queue does not close it for others.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use crate::request::{AdapterId, ClientId, RequestId};
use crate::sequence::{SchedulingKey, Sequence};
use crate::share::bound_of;

/// The waiting sequences of a client with an adapter, without the paused ones. Those of a client are adjacent.
pub(super) type Lane = (Option<ClientId>, Option<AdapterId>);

/// The place of a lane in the order of all lanes: the fields are compared one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// The priority of its first sequence.
    priority: i32,
    /// The number of running sequences of its client.
    num_running: usize,
    /// The turn of its client.
    turn: u64,
    /// The id of its first sequence.
    id: RequestId,
    lane: Lane,
}

/// The sequences of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Client {
    /// Sequences that wait or run.
    num_unfinished: usize,
    /// Sequences with a slot.
    num_running: usize,
    /// Requests that were never scheduled.
    num_new: usize,
    /// The turn at which the client got a slot last; see `Clients::last_turn`.
    turn: u64,
}

/// All clients with sequences.
///
/// Invariants: no client and no lane is without sequences; `order` has the place of each lane.
#[derive(Default)]
pub(super) struct Clients {
    clients: BTreeMap<Option<ClientId>, Client>,
    /// The number of clients with requests that were never scheduled.
    num_with_new: usize,
    /// The turn of the client that got a slot last. Turns increase by 2, and those in between are of clients that have
    /// got none yet.
    last_turn: u64,
    lanes: BTreeMap<Lane, BTreeSet<SchedulingKey>>,
    order: BTreeSet<Place>,
}

fn client_of(sequence: &Sequence) -> Option<ClientId> {
    sequence.request.client
}

pub(super) fn lane_of(sequence: &Sequence) -> Lane {
    (sequence.request.client, sequence.request.adapter)
}

impl Clients {
    /// Counts a sequence that arrives.
    pub(super) fn add(&mut self, sequence: &Sequence) {
        let turn = self.last_turn.saturating_sub(1);
        let client = self.clients.entry(client_of(sequence)).or_insert(Client { turn, ..Client::default() });
        client.num_unfinished += 1;
    }

    /// Removes a sequence that ends and neither runs nor waits any more.
    pub(super) fn remove(&mut self, sequence: &Sequence) {
        let Entry::Occupied(mut client) = self.clients.entry(client_of(sequence)) else {
            panic!("a sequence has a client; this is a bug");
        };
        client.get_mut().num_unfinished -= 1;
        if client.get().num_unfinished == 0 {
            client.remove();
        }
    }

    /// Counts a sequence that waits and was never scheduled.
    pub(super) fn add_new(&mut self, sequence: &Sequence) {
        let client = self.client(sequence);
        client.num_new += 1;
        self.num_with_new += usize::from(client.num_new == 1);
    }

    /// The opposite of `add_new`.
    pub(super) fn remove_new(&mut self, sequence: &Sequence) {
        let client = self.client(sequence);
        client.num_new -= 1;
        self.num_with_new -= usize::from(client.num_new == 0);
    }

    fn client(&mut self, sequence: &Sequence) -> &mut Client {
        self.clients.get_mut(&client_of(sequence)).expect("a sequence has a client; this is a bug")
    }

    /// Counts a sequence that gets a slot.
    pub(super) fn enter_slot(&mut self, sequence: &Sequence) {
        self.last_turn += 2;
        let turn = self.last_turn;
        self.change_places(sequence, |client| {
            client.num_running += 1;
            client.turn = turn;
        });
    }

    /// Counts a sequence that loses its slot.
    pub(super) fn leave_slot(&mut self, sequence: &Sequence) {
        self.change_places(sequence, |client| client.num_running -= 1);
    }

    /// Adds a sequence that waits and is not paused.
    pub(super) fn add_waiting(&mut self, sequence: &Sequence) {
        self.change_lane(lane_of(sequence), |keys| keys.insert(sequence.key));
    }

    /// The opposite of `add_waiting`.
    pub(super) fn remove_waiting(&mut self, sequence: &Sequence) {
        self.change_lane(lane_of(sequence), |keys| keys.remove(&sequence.key));
    }

    /// The first waiting sequence, among those with a wanted adapter that can be scheduled.
    pub(super) fn first(
        &self,
        is_wanted: impl Fn(Option<AdapterId>) -> bool,
        can_be_scheduled: impl Fn(SchedulingKey) -> bool,
    ) -> Option<SchedulingKey> {
        let mut first: Option<Place> = None;
        for place in self.order.iter().filter(|place| is_wanted(place.lane.1)) {
            if first.is_some_and(|first| first < *place) {
                break;
            }
            // Most often that of the place.
            let key = self.lanes[&place.lane].iter().find(|key| can_be_scheduled(**key));
            let own = key.map(|key| Place { priority: key.priority, id: key.id, ..*place });
            first = first.into_iter().chain(own).min();
        }
        first.map(|Place { priority, id, .. }| SchedulingKey { priority, id })
    }

    /// The adapters of the waiting sequences.
    pub(super) fn adapters(&self) -> BTreeSet<AdapterId> {
        self.lanes.keys().filter_map(|(_, adapter)| *adapter).collect()
    }

    /// The number of sequences with a slot that the client of a sequence has.
    pub(super) fn num_running(&self, sequence: &Sequence) -> usize {
        self.clients.get(&client_of(sequence)).map_or(0, |client| client.num_running)
    }

    /// The bound on unfinished sequences for a client that adds some: `limit`, which is that of all, or twice as many.
    pub(super) fn max_unfinished(&self, id: Option<ClientId>, num_added: usize, limit: usize) -> usize {
        let own = self.clients.get(&id).map_or(0, |client| client.num_unfinished);
        bound_of(own, num_added, self.clients.len(), limit)
    }

    /// The bound on requests that were never scheduled, in the same way.
    pub(super) fn max_new(&self, id: Option<ClientId>, num_added: usize, limit: usize) -> usize {
        let own = self.clients.get(&id).map_or(0, |client| client.num_new);
        bound_of(own, num_added, self.num_with_new, limit)
    }

    /// The clients with sequences.
    pub(super) fn ids(&self) -> impl Iterator<Item = Option<ClientId>> {
        self.clients.keys().copied()
    }

    fn place(&self, lane: Lane) -> Option<Place> {
        let SchedulingKey { priority, id } = *self.lanes.get(&lane)?.first()?;
        let Client { num_running, turn, .. } = self.clients[&lane.0];
        Some(Place { priority, num_running, turn, id, lane })
    }

    fn change_lane(&mut self, lane: Lane, change: impl FnOnce(&mut BTreeSet<SchedulingKey>) -> bool) {
        if let Some(place) = self.place(lane) {
            self.order.remove(&place);
        }
        let keys = self.lanes.entry(lane).or_default();
        change(keys);
        if keys.is_empty() {
            self.lanes.remove(&lane);
        }
        self.order.extend(self.place(lane));
    }

    /// Changes the numbers that determine the places of a client's lanes.
    fn change_places(&mut self, sequence: &Sequence, change: impl FnOnce(&mut Client)) {
        let id = client_of(sequence);
        let lanes = self.lanes.range((id, None)..).map(|(lane, _)| *lane).take_while(|lane| lane.0 == id);
        let mut places: Vec<_> = lanes.filter_map(|lane| self.place(lane)).collect();
        for place in &places {
            self.order.remove(place);
        }
        let client = self.client(sequence);
        change(client);
        let Client { num_running, turn, .. } = *client;
        places.iter_mut().for_each(|place| *place = Place { num_running, turn, ..*place });
        self.order.extend(places);
    }

    /// Panics unless the numbers are those of these sequences: `others` are paused or wait for a leader.
    pub(super) fn check_integrity<'a>(
        &self,
        running: impl Iterator<Item = &'a Sequence>,
        new: impl Iterator<Item = &'a Sequence>,
        preempted: impl Iterator<Item = &'a Sequence>,
        others: impl Iterator<Item = &'a Sequence>,
    ) {
        let mut found = Self::default();
        for sequence in running {
            found.add(sequence);
            found.enter_slot(sequence);
        }
        for sequence in new {
            found.add(sequence);
            found.add_new(sequence);
            found.add_waiting(sequence);
        }
        for sequence in preempted {
            found.add(sequence);
            found.add_waiting(sequence);
        }
        others.for_each(|sequence| found.add(sequence));
        assert_eq!(found.lanes, self.lanes, "waiting sequences of clients; this is a bug");
        assert_eq!(found.num_with_new, self.num_with_new, "clients miscounted; this is a bug");
        assert!(found.clients.keys().eq(self.clients.keys()), "clients lost or left; this is a bug");
        for (id, client) in &self.clients {
            let expected = Client { turn: client.turn, ..found.clients[id] };
            assert_eq!(*client, expected, "client {id:?} miscounted; this is a bug");
        }
        let places: BTreeSet<_> = self.lanes.keys().filter_map(|lane| self.place(*lane)).collect();
        assert_eq!(places, self.order, "lanes out of order; this is a bug");
    }
}
