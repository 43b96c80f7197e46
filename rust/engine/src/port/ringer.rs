//! The engine's side of all ports: those with new events are rung once per iteration.
//!
//! Owned by the engine thread. A port is known while requests of it are open, by an index, so that touching one per
//! token costs no hash and no reference count.

use rustc_hash::FxHashMap;

use super::bell::Bell;
use crate::request::RequestId;

/// A port the [`Ringer`] knows, valid from `connect` to the matching `disconnect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortIndex(u32);

/// The ports with open requests.
///
/// Invariants: `by_address` holds exactly the occupied entries; `touched` lists each entry with `is_touched` once; an
/// entry without users is touched (it leaves at the next `ring`).
#[derive(Default)]
pub struct Ringer {
    entries: Vec<Option<PortEntry>>,
    vacant: Vec<u32>,
    by_address: FxHashMap<usize, u32>,
    touched: Vec<u32>,
}

struct PortEntry {
    bell: Bell,
    users: usize,
    is_touched: bool,
    /// Requests to add to the port's list.
    listed: Vec<RequestId>,
}

impl Ringer {
    /// Counts one more open request on the bell's port.
    pub fn connect(&mut self, bell: &Bell) -> PortIndex {
        let index = *self.by_address.entry(bell.address()).or_insert_with(|| {
            let index = self.vacant.pop().unwrap_or_else(|| {
                self.entries.push(None);
                self.entries.len() as u32 - 1
            });
            self.entries[index as usize] =
                Some(PortEntry { bell: bell.clone(), users: 0, is_touched: false, listed: Vec::new() });
            index
        });
        self.entry(PortIndex(index)).users += 1;
        PortIndex(index)
    }

    /// Counts one open request less. Its last event was just pushed, so this also touches the port.
    pub fn disconnect(&mut self, port: PortIndex, listed: Option<RequestId>) {
        self.touch(port, listed);
        self.entry(port).users -= 1;
    }

    /// Marks a port for which an event was pushed; `listed` is to be added to its list.
    pub fn touch(&mut self, port: PortIndex, listed: Option<RequestId>) {
        let entry = self.entry(port);
        entry.listed.extend(listed);
        if !std::mem::replace(&mut entry.is_touched, true) {
            self.touched.push(port.0);
        }
    }

    /// Extends the list of every touched port, rings it once, and removes those without open requests.
    pub fn ring(&mut self) {
        for index in self.touched.drain(..) {
            let slot = &mut self.entries[index as usize];
            let entry = slot.as_mut().expect("a touched port is known; this is a bug");
            entry.bell.list(&mut entry.listed);
            entry.bell.ring();
            entry.is_touched = false;
            if entry.users == 0 {
                self.by_address.remove(&entry.bell.address());
                *slot = None;
                self.vacant.push(index);
            }
        }
    }

    fn entry(&mut self, port: PortIndex) -> &mut PortEntry {
        self.entries[port.0 as usize].as_mut().expect("a connected port is known; this is a bug")
    }

    /// Panics unless the entries agree with each other and count `num_unfinished` open requests.
    pub fn check_integrity(&self, num_unfinished: usize) {
        let mut users = 0;
        let mut occupied = 0;
        for (index, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            occupied += 1;
            users += entry.users;
            assert_eq!(
                self.by_address.get(&entry.bell.address()),
                Some(&(index as u32)),
                "port lost; this is a bug"
            );
            assert_eq!(self.touched.contains(&(index as u32)), entry.is_touched, "touch lost; this is a bug");
            assert!(entry.users > 0 || entry.is_touched, "port {index} leaked; this is a bug");
        }
        assert_eq!(users, num_unfinished, "open requests and users of ports differ; this is a bug");
        assert_eq!(occupied, self.by_address.len(), "ports and addresses differ; this is a bug");
        assert_eq!(occupied + self.vacant.len(), self.entries.len(), "entries leaked; this is a bug");
    }
}

impl Drop for Ringer {
    /// If the engine crashes between a push and its ring, the listener is woken all the same.
    fn drop(&mut self) {
        self.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::port::Port;

    #[test]
    fn touched_ports_are_rung_and_unused_ones_removed() {
        let ports = [Port::with_condvar(), Port::with_condvar()];
        let is_rung = |port: &Port| port.wait(Some(Duration::ZERO));
        let mut ringer = Ringer::default();
        let [first, second] = [ringer.connect(&ports[0].bell()), ringer.connect(&ports[1].bell())];
        assert_eq!(ringer.connect(&ports[0].bell()), first, "clones of a bell are one port");
        ringer.touch(second, Some(RequestId(2)));
        ringer.touch(second, Some(RequestId(3)));
        ringer.check_integrity(3);
        ringer.ring();
        assert!(!is_rung(&ports[0]) && is_rung(&ports[1]));
        let mut listed = Vec::new();
        ports[1].take_listed(&mut listed);
        assert_eq!(listed, [RequestId(2), RequestId(3)]);
        assert!(!is_rung(&ports[1]), "taking the list clears the bell");
        ringer.disconnect(first, Some(RequestId(1)));
        ringer.disconnect(second, None);
        ringer.ring();
        assert!(is_rung(&ports[0]));
        ports[1].take_listed(&mut listed);
        assert_eq!(listed.len(), 2, "each id is taken once");
        ports[0].take_listed(&mut listed);
        assert_eq!(listed.len(), 3);
        ringer.check_integrity(1);
        assert_eq!(
            ringer.connect(&Port::with_condvar().bell()),
            second,
            "the index of a removed port is reused"
        );
        ringer.check_integrity(2);
    }

    #[test]
    fn a_crash_between_push_and_ring_still_rings() {
        let port = Port::with_condvar();
        let mut ringer = Ringer::default();
        let index = ringer.connect(&port.bell());
        ringer.touch(index, None);
        drop(ringer);
        assert!(port.wait(Some(Duration::ZERO)));
    }
}
