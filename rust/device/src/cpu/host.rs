//! Resources that the CPU backends of a process share: worker pools, and the account of the memory that they have
//! reserved.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use penstock_kernels::{Pool, usable_cpus};

use super::numa::NumaNode;
use crate::system::{AvailableMemory, available_memory, resident_bytes};

/// Worker pools and memory that backends share.
#[derive(Debug, Default)]
pub struct CpuHost {
    /// The most bytes that the backends may reserve together.
    memory_limit: Option<u64>,
    pools: Mutex<Vec<SharedPool>>,
    reservations: Mutex<Vec<Weak<Reservation>>>,
}

/// A pool and the nodes of its threads.
#[derive(Debug)]
struct SharedPool {
    pool: Weak<Pool>,
    nodes: Vec<NumaNode>,
}

/// The memory of the host that one backend takes: an arena, mapped files, adapters, and page-locked memory. The system
/// provides the pages of the arena when they are first written.
#[derive(Debug, Default)]
pub(crate) struct Reservation {
    address: usize,
    arena: usize,
    /// Bytes outside the arena.
    outside: AtomicU64,
    /// Bytes of these that are page-locked by now: the system does not count them as available any more.
    locked: AtomicU64,
}

impl CpuHost {
    /// A host whose backends may reserve `memory_limit` bytes together.
    pub fn new(memory_limit: Option<u64>) -> Self {
        Self { memory_limit, ..Self::default() }
    }

    /// A pool with this number of threads on these nodes. If the CPUs have no room for its threads beside those of the
    /// other pools on these nodes, it takes turns with one of them, or is the same pool. A pool ends with the last
    /// backend that uses it.
    pub(super) fn pool(&self, threads: usize, nodes: &[NumaNode]) -> io::Result<Arc<Pool>> {
        let num_cpus = match nodes {
            [] => usable_cpus(),
            nodes => nodes.iter().map(|node| node.cpus.len()).sum(),
        };
        let mut pools = lock(&self.pools);
        pools.retain(|shared| shared.pool.strong_count() > 0);
        let existing = pools.iter().filter(|shared| shared.nodes == nodes);
        let groups = grouped(existing.filter_map(|shared| shared.pool.upgrade()));
        let num_used: usize = groups.iter().map(|group| width(group)).sum();
        let pool = match groups.iter().min_by_key(|group| num_users(group)) {
            Some(group) if num_used + threads > num_cpus => {
                if let Some(pool) = group.iter().find(|pool| pool.threads() == threads) {
                    return Ok(Arc::clone(pool));
                }
                group[0].with_other_threads(threads)?
            }
            _ => Pool::on_nodes(threads, nodes.iter().map(|node| node.cpus.clone()).collect())?,
        };
        let pool = Arc::new(pool);
        pools.push(SharedPool { pool: Arc::downgrade(&pool), nodes: nodes.to_vec() });
        Ok(pool)
    }

    /// The most bytes that the backends may reserve together.
    pub fn memory_limit(&self) -> Option<u64> {
        self.memory_limit
    }

    /// The memory that another backend may reserve, on any NUMA node.
    pub fn available_memory(&self) -> AvailableMemory {
        self.remaining(available_memory())
    }

    /// The part of `available`, which the system reports, that is not reserved.
    pub(super) fn remaining(&self, available: AvailableMemory) -> AvailableMemory {
        let reservations = self.reservations();
        let untouched = reservations.iter().map(|reservation| reservation.untouched()).sum();
        let limit = self.memory_limit.unwrap_or(u64::MAX);
        available.without(untouched).at_most(limit.saturating_sub(reserved(&reservations)))
    }

    /// Bytes that the backends have reserved.
    pub fn reserved_memory(&self) -> u64 {
        reserved(&self.reservations())
    }

    /// Accounts for the memory of an arena, until the reservation is dropped.
    pub(super) fn reserve(&self, arena: &[u8]) -> Arc<Reservation> {
        let (address, arena) = (arena.as_ptr().addr(), arena.len());
        self.account(Reservation { address, arena, ..Reservation::default() })
    }

    /// Accounts for the memory of a backend that has no arena in the host, until the reservation is dropped.
    pub(crate) fn reserve_without_arena(&self) -> Arc<Reservation> {
        self.account(Reservation::default())
    }

    fn account(&self, reservation: Reservation) -> Arc<Reservation> {
        let reservation = Arc::new(reservation);
        let mut reservations = lock(&self.reservations);
        reservations.retain(|reservation| reservation.strong_count() > 0);
        reservations.push(Arc::downgrade(&reservation));
        reservation
    }

    fn reservations(&self) -> Vec<Arc<Reservation>> {
        lock(&self.reservations).iter().filter_map(Weak::upgrade).collect()
    }
}

/// The pools, those that take turns together.
fn grouped(pools: impl Iterator<Item = Arc<Pool>>) -> Vec<Vec<Arc<Pool>>> {
    let mut groups: Vec<Vec<Arc<Pool>>> = Vec::new();
    for pool in pools {
        match groups.iter_mut().find(|group| group[0].shares_turns_with(&pool)) {
            Some(group) => group.push(pool),
            None => groups.push(vec![pool]),
        }
    }
    groups
}

/// The most threads that compute at a time.
fn width(group: &[Arc<Pool>]) -> usize {
    group.iter().map(|pool| pool.threads()).max().unwrap_or(0)
}

fn num_users(group: &[Arc<Pool>]) -> usize {
    group.iter().map(Arc::strong_count).sum()
}

fn reserved(reservations: &[Arc<Reservation>]) -> u64 {
    reservations.iter().map(|reservation| reservation.bytes()).sum()
}

impl Reservation {
    /// Replaces the number of bytes outside the arena.
    pub(crate) fn set_outside(&self, bytes: u64) {
        self.outside.store(bytes, Ordering::Relaxed); // read for a sum only
    }

    /// Counts bytes outside the arena as page-locked.
    pub(crate) fn lock(&self, bytes: u64) {
        self.locked.fetch_add(bytes, Ordering::Relaxed); // as above
    }

    /// The same bytes are free again.
    pub(crate) fn unlock(&self, bytes: u64) {
        self.locked.fetch_sub(bytes, Ordering::Relaxed); // as above
    }

    pub(super) fn bytes(&self) -> u64 {
        self.arena as u64 + self.outside()
    }

    /// Page-locked memory that was not planned counts, too.
    fn outside(&self) -> u64 {
        self.outside.load(Ordering::Relaxed).max(self.locked())
    }

    /// Bytes that are page-locked.
    pub(crate) fn locked(&self) -> u64 {
        self.locked.load(Ordering::Relaxed)
    }

    /// Bytes that the system still counts as available: pages of the arena that were never written, and all pages of
    /// mapped files, which it can drop. Adapters count too, also loaded ones, and page-locked memory until it is taken.
    fn untouched(&self) -> u64 {
        let resident = resident_bytes(self.address, self.arena).unwrap_or(0);
        (self.arena - resident) as u64 + self.outside().saturating_sub(self.locked())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::Cpu;
    use super::*;
    use crate::arena::HostSlab;
    use crate::seam::Memory;

    const MIB: u64 = 1 << 20;

    #[test]
    fn unwritten_pages_and_mapped_files_are_not_available() {
        let host = CpuHost::new(None);
        let mut slab = HostSlab::reserve(8 << 20).expect("memory");
        let reservation = host.reserve(slab.as_ref());
        let remaining_of = |bytes: u64| host.remaining(bytes.into()).bytes;
        assert_eq!((remaining_of(20 * MIB), host.reserved_memory()), (12 * MIB, 8 * MIB));
        slab.as_mut()[..3 << 20].fill(1);
        // The system counts written pages as used. It may provide a huge page for them.
        let remaining = remaining_of(17 * MIB);
        assert!((12 * MIB..=13 * MIB).contains(&remaining), "{remaining}");
        reservation.set_outside(5 * MIB);
        assert_eq!((remaining_of(17 * MIB), host.reserved_memory()), (remaining - 5 * MIB, 13 * MIB));
        assert_eq!(remaining_of(MIB), 0);
        reservation.lock(4 * MIB); // the system does not report them as available
        assert_eq!((remaining_of(13 * MIB), host.reserved_memory()), (remaining - 5 * MIB, 13 * MIB));
        reservation.lock(2 * MIB);
        assert_eq!(host.reserved_memory(), 14 * MIB, "more than was planned");
        drop(reservation);
        assert_eq!((remaining_of(17 * MIB), host.reserved_memory()), (17 * MIB, 0));
    }

    #[test]
    fn limit_counts_reserved_memory_written_or_not() {
        let host = Arc::new(CpuHost::new(Some(10 * MIB)));
        let mut cpus = [0, 1].map(|_| Cpu::open(&host, 1, "", &[]).expect("a thread"));
        assert_eq!(cpus[0].available_memory(), Ok((10 * MIB).into()));
        cpus[0].reserve(6 * MIB).expect("memory");
        cpus[0].reserve_outside(MIB);
        let [first, second] = &cpus;
        assert_eq!(first.available_memory(), second.available_memory());
        assert_eq!(first.available_memory(), Ok((3 * MIB).into()));
        assert_eq!((host.available_memory().bytes, host.reserved_memory()), (3 * MIB, 7 * MIB));
        cpus[0].reserve(2 * MIB).expect("memory");
        assert_eq!(
            cpus[1].available_memory(),
            Ok((8 * MIB).into()),
            "a second reservation replaces the first"
        );
    }

    #[test]
    fn pools_take_turns_when_the_cpus_are_in_use() {
        let host = CpuHost::default();
        let nodes = [NumaNode { id: 0, cpus: vec![0, 1, 2, 3], cores: 4 }];
        let pool = |threads| host.pool(threads, &nodes).expect("threads");
        let mut pools: Vec<_> = (0..4).map(|_| pool(2)).collect();
        assert!(!pools[0].shares_turns_with(&pools[1]), "two pools of two threads fit");
        assert_eq!(pools.iter().map(Arc::strong_count).collect::<Vec<_>>(), [2; 4]);
        for threads in [1, 3, 5] {
            let [first, second] = [0, 1].map(|_| pool(threads));
            assert_eq!((first.threads(), second.threads()), (threads, threads));
            for pool in [&first, &second] {
                assert!(pools[..2].iter().any(|other| other.shares_turns_with(pool)), "{threads} threads");
            }
        }
        assert!(!host.pool(2, &[]).expect("threads").shares_turns_with(&pools[0]), "other nodes");
        let ended = Arc::downgrade(&pools[0]);
        pools.clear();
        assert!(ended.upgrade().is_none(), "the host does not keep a pool");
    }
}
