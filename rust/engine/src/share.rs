//! The bound of a client on something that is bounded for all clients together, such as the requests that wait.

/// The bound for a client that has `own` of what `num_clients` have, and adds some: `limit`, which is that of all, or
/// twice as much for a client with less than its share.
pub(crate) fn bound_of(own: usize, num_added: usize, num_clients: usize, limit: usize) -> usize {
    let num_clients = num_clients + usize::from(own == 0);
    let is_share = num_clients > 1 && own.saturating_add(num_added) <= limit.div_ceil(num_clients);
    if is_share { limit.saturating_mul(2) } else { limit }
}
