//! [`Listener`]: a port, and the requests that receive their output when it is drained.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use penstock_engine::{Port, RequestId};

use super::RequestState;

/// The port of an event loop or of a blocking caller, and the open requests of one engine that were started on it.
pub struct Listener {
    port: Port,
    open: Mutex<OpenRequests>,
}

#[derive(Default)]
struct OpenRequests {
    /// The open requests by the id of their first choice; the ids of the others follow it.
    requests: BTreeMap<u64, OpenRequest>,
    /// Scratch of `drain`.
    listed: Vec<RequestId>,
}

struct OpenRequest {
    num_choices: u64,
    state: Weak<RequestState>,
}

impl Listener {
    /// A listener on `port`.
    pub fn new(port: Port) -> Self {
        Self { port, open: Mutex::default() }
    }

    /// The port on which its requests are started.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Receives for `request`, which was started on the port, from now on.
    pub fn add(&self, request: &Arc<RequestState>) {
        let open = OpenRequest { num_choices: request.num_choices, state: Arc::downgrade(request) };
        self.lock().requests.insert(request.id, open);
        // A drain may have dropped the ids of the choices before they were known here.
        request.receive_choices(0..request.num_choices as usize);
        if request.is_over() {
            self.lock().requests.remove(&request.id);
        }
    }

    /// Clears the bell and receives the events that have arrived, of the choices that have some. Returns the ids of the
    /// requests that reached a milestone which a listener waits for.
    pub fn drain(&self) -> Vec<u64> {
        let mut reached = Vec::new();
        let OpenRequests { requests, listed } = &mut *self.lock();
        self.port.take_listed(listed);
        listed.sort_unstable();
        let mut rest = &listed[..];
        while let Some(RequestId(id)) = rest.first() {
            let Some((&first, request)) = requests.range(..=id).next_back() else {
                rest = &rest[1..];
                continue;
            };
            let end = first + request.num_choices;
            let (choices, others) = rest.split_at(rest.partition_point(|id| id.0 < end));
            if choices.is_empty() {
                rest = &rest[1..]; // its request has been dropped
                continue;
            }
            rest = others;
            let state = request.state.upgrade();
            let is_open = state.is_some_and(|state| {
                if state.receive_choices(choices.iter().map(|id| (id.0 - first) as usize)) {
                    reached.push(first);
                }
                !state.is_over()
            });
            if !is_open {
                requests.remove(&first);
            }
        }
        listed.clear();
        reached
    }

    fn lock(&self) -> MutexGuard<'_, OpenRequests> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
