//! Resources that the CPU backends of a process share: worker pools, and the account of the memory that they have reserved.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::available_parallelism;

use penstock_kernels::{Pool, resident_bytes};

use super::numa::NumaNode;

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

/// The memory of one backend: an arena, whose pages the system provides when they are first written, and mapped files.
#[derive(Debug)]
pub(super) struct Reservation {
    address: usize,
    arena: usize,
    mapped: AtomicU64,
}

impl CpuHost {
    /// A host whose backends may reserve `memory_limit` bytes together.
    pub fn new(memory_limit: Option<u64>) -> Self {
        Self { memory_limit, ..Self::default() }
    }

    /// A pool with this number of threads on these nodes. Backends share one if the CPUs have no room for more. A pool ends
    /// with the last backend that uses it.
    pub(super) fn pool(&self, threads: usize, nodes: &[NumaNode]) -> io::Result<Arc<Pool>> {
        let num_cpus = match nodes {
            [] => available_parallelism().map_or(1, usize::from),
            nodes => nodes.iter().map(|node| node.cpus.len()).sum(),
        };
        let mut pools = lock(&self.pools);
        pools.retain(|shared| shared.pool.strong_count() > 0);
        let same = pools.iter().filter(|shared| shared.nodes == nodes);
        let same = same.filter_map(|shared| shared.pool.upgrade().filter(|pool| pool.threads() == threads));
        let same: Vec<_> = same.collect();
        if (same.len() + 1) * threads > num_cpus
            && let Some(pool) = same.into_iter().min_by_key(Arc::strong_count)
        {
            return Ok(pool);
        }
        let cpus = nodes.iter().map(|node| node.cpus.clone()).collect();
        let pool = Arc::new(Pool::on_nodes(threads, cpus)?);
        pools.push(SharedPool { pool: Arc::downgrade(&pool), nodes: nodes.to_vec() });
        Ok(pool)
    }

    /// The part of `available` bytes, which the system reports, that is not reserved.
    pub(super) fn remaining(&self, available: u64) -> u64 {
        let reservations = self.reservations();
        let untouched = reservations.iter().map(|reservation| reservation.untouched()).sum();
        let limit = self.memory_limit.unwrap_or(u64::MAX);
        available.saturating_sub(untouched).min(limit.saturating_sub(reserved(&reservations)))
    }

    /// Bytes that the backends have reserved.
    pub fn reserved_memory(&self) -> u64 {
        reserved(&self.reservations())
    }

    /// Accounts for the memory of an arena, until the reservation is dropped.
    pub(super) fn reserve(&self, arena: &[u8]) -> Arc<Reservation> {
        let (address, arena) = (arena.as_ptr().addr(), arena.len());
        let reservation = Arc::new(Reservation { address, arena, mapped: AtomicU64::new(0) });
        let mut reservations = lock(&self.reservations);
        reservations.retain(|reservation| reservation.strong_count() > 0);
        reservations.push(Arc::downgrade(&reservation));
        reservation
    }

    fn reservations(&self) -> Vec<Arc<Reservation>> {
        lock(&self.reservations).iter().filter_map(Weak::upgrade).collect()
    }
}

fn reserved(reservations: &[Arc<Reservation>]) -> u64 {
    reservations.iter().map(|reservation| reservation.bytes()).sum()
}

impl Reservation {
    /// Adds the bytes of mapped files.
    pub(super) fn add_mapped(&self, bytes: u64) {
        self.mapped.fetch_add(bytes, Ordering::Relaxed); // read for a sum only
    }

    pub(super) fn bytes(&self) -> u64 {
        self.arena as u64 + self.mapped()
    }

    fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }

    /// Bytes that the system still counts as available: pages of the arena that were never written, and all pages of
    /// mapped files, which it can drop.
    fn untouched(&self) -> u64 {
        let resident = resident_bytes(self.address, self.arena).unwrap_or(0);
        (self.arena - resident) as u64 + self.mapped()
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
    use crate::backend::Backend;

    const MIB: u64 = 1 << 20;

    #[test]
    fn unwritten_pages_and_mapped_files_are_not_available() {
        let host = CpuHost::new(None);
        let mut slab = HostSlab::reserve(8 << 20).expect("memory");
        let reservation = host.reserve(slab.as_ref());
        assert_eq!((host.remaining(20 * MIB), host.reserved_memory()), (12 * MIB, 8 * MIB));
        slab.as_mut()[..3 << 20].fill(1);
        // The system counts written pages as used. It may provide a huge page for them.
        let remaining = host.remaining(17 * MIB);
        assert!((12 * MIB..=13 * MIB).contains(&remaining), "{remaining}");
        reservation.add_mapped(5 * MIB);
        assert_eq!((host.remaining(17 * MIB), host.reserved_memory()), (remaining - 5 * MIB, 13 * MIB));
        assert_eq!(host.remaining(MIB), 0);
        drop(reservation);
        assert_eq!((host.remaining(17 * MIB), host.reserved_memory()), (17 * MIB, 0));
    }

    #[test]
    fn limit_counts_reserved_memory_written_or_not() {
        let host = Arc::new(CpuHost::new(Some(10 * MIB)));
        let mut cpus = [0, 1].map(|_| Cpu::open(&host, 1, "", &[]).expect("a thread"));
        assert_eq!(cpus[0].available_memory(), 10 * MIB);
        cpus[0].reserve(6 * MIB).expect("memory");
        cpus[0].reserve_mapped(MIB);
        let [first, second] = &cpus;
        assert_eq!((second.available_memory(), second.reserved_by_others()), (3 * MIB, 7 * MIB));
        assert_eq!(first.reserved_by_others(), 0);
        cpus[0].reserve(2 * MIB).expect("memory");
        assert_eq!(cpus[1].available_memory(), 8 * MIB, "a second reservation replaces the first");
    }

    #[test]
    fn pools_are_shared_when_the_cpus_are_in_use() {
        let host = CpuHost::default();
        let nodes = [NumaNode { id: 0, cpus: vec![0, 1, 2, 3], cores: 4 }];
        let mut pools: Vec<_> = (0..4).map(|_| host.pool(2, &nodes).expect("threads")).collect();
        assert!(!Arc::ptr_eq(&pools[0], &pools[1]), "two pools of two threads fit");
        assert_eq!(pools.iter().map(Arc::strong_count).collect::<Vec<_>>(), [2; 4]);
        for threads in [3, 5] {
            let pools = [0, 1].map(|_| host.pool(threads, &nodes).expect("threads"));
            assert!(Arc::ptr_eq(&pools[0], &pools[1]) && pools[0].threads() == threads);
        }
        assert!(!Arc::ptr_eq(&host.pool(2, &[]).expect("threads"), &pools[0]), "other nodes");
        let ended = Arc::downgrade(&pools[0]);
        pools.clear();
        assert!(ended.upgrade().is_none(), "the host does not keep a pool");
    }
}
