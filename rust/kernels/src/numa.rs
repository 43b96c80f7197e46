//! The CPUs of threads and the NUMA nodes of memory. System calls of Linux; on other systems they are refused.

use std::io;

/// The CPUs on which the calling thread may run, in ascending order.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let mut set = BitSet::default();
    system::allowed_cpus(&mut set)?;
    Ok((0..MAX_CPUS).filter(|cpu| set.contains(*cpu)).collect())
}

/// Restricts the calling thread to these CPUs.
pub(crate) fn pin(cpus: &[usize]) -> io::Result<()> {
    system::pin(&BitSet::new(cpus)?)
}

/// Sets the nodes of the pages of `bytes` that are not yet in memory. One node is preferred while it has free memory;
/// pages are interleaved over several. A page that `bytes` shares with other memory gets these nodes, too.
pub fn place(bytes: &mut [u8], nodes: &[usize]) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    if nodes.iter().any(|node| *node >= MAX_NODES) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    system::place(bytes, &BitSet::new(nodes)?, nodes.len() > 1)
}

/// The range of the panels that a node computes, of `panels` that are divided between `nodes`.
pub fn panels_of_node(panels: usize, nodes: usize, node: usize) -> std::ops::Range<usize> {
    let start = |node: usize| panels * node / nodes;
    start(node)..start(node + 1)
}

/// Linux has at most this number of CPUs.
const MAX_CPUS: usize = 8192;
/// Linux has at most this number of nodes.
const MAX_NODES: usize = 1024;

/// A set of CPUs or nodes, as the kernel reads it.
struct BitSet([u64; MAX_CPUS / 64]);

impl Default for BitSet {
    fn default() -> Self {
        Self([0; MAX_CPUS / 64])
    }
}

impl BitSet {
    fn new(ids: &[usize]) -> io::Result<Self> {
        let mut set = Self::default();
        for id in ids {
            let word = set.0.get_mut(id / 64).ok_or(io::ErrorKind::InvalidInput)?;
            *word |= 1 << (id % 64);
        }
        Ok(set)
    }

    fn contains(&self, id: usize) -> bool {
        self.0[id / 64] >> (id % 64) & 1 == 1
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::io;

    use libc::{SYS_mbind, SYS_sched_getaffinity, SYS_sched_setaffinity, c_long, syscall};

    use super::{BitSet, MAX_NODES};

    /// The calling thread.
    const SELF: c_long = 0;
    /// The size that `mbind` is given: the kernel subtracts 1 from it.
    const NODE_BITS: usize = MAX_NODES + 1;

    fn check(result: c_long) -> io::Result<()> {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub(super) fn allowed_cpus(set: &mut BitSet) -> io::Result<()> {
        // SAFETY: the kernel writes at most the given number of bytes.
        check(unsafe { syscall(SYS_sched_getaffinity, SELF, size_of_val(&set.0), set.0.as_mut_ptr()) })
    }

    pub(super) fn pin(set: &BitSet) -> io::Result<()> {
        // SAFETY: the kernel reads the given number of bytes.
        check(unsafe { syscall(SYS_sched_setaffinity, SELF, size_of_val(&set.0), set.0.as_ptr()) })
    }

    pub(super) fn place(bytes: &mut [u8], nodes: &BitSet, interleaved: bool) -> io::Result<()> {
        let mode = if interleaved { libc::MPOL_INTERLEAVE } else { libc::MPOL_PREFERRED };
        // SAFETY: only returns a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let start = bytes.as_mut_ptr().addr() / page * page;
        let len = bytes.as_mut_ptr().addr() + bytes.len() - start;
        let flags: c_long = 0;
        // SAFETY: the policy of pages does not change their contents; the kernel reads `NODE_BITS` of the mask.
        check(unsafe {
            syscall(SYS_mbind, start, len, c_long::from(mode), nodes.0.as_ptr(), NODE_BITS, flags)
        })
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::io;

    use super::BitSet;

    pub(super) fn allowed_cpus(_: &mut BitSet) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn pin(_: &BitSet) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn place(_: &mut [u8], _: &BitSet, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_of_all_nodes_are_the_panels_in_order() {
        for (panels, nodes) in [(0, 1), (1, 4), (7, 2), (64, 16), (1000, 3)] {
            let all: Vec<_> = (0..nodes).flat_map(|node| panels_of_node(panels, nodes, node)).collect();
            assert_eq!(all, (0..panels).collect::<Vec<_>>());
        }
    }

    #[test]
    fn id_beyond_the_kernels_limit_is_an_error() {
        assert!(pin(&[MAX_CPUS]).is_err());
        for node in [1024, 8191, MAX_CPUS] {
            assert!(place(&mut [0], &[node]).is_err());
        }
    }

    /// The kernel's policy of the mapping at `address`; `None` if the kernel does not show policies.
    #[cfg(target_os = "linux")]
    fn policy_at(address: usize) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/numa_maps").ok()?;
        let mappings = maps.lines().filter_map(|line| line.split_once(' '));
        let start = |text| usize::from_str_radix(text, 16).expect("an address");
        let (_, rest) = mappings.take_while(|(text, _)| start(text) <= address).last()?;
        rest.split(' ').next().map(str::to_owned)
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn placed_memory_has_the_policy_of_its_nodes() {
        let status = std::fs::read_to_string("/proc/self/status").expect("the status");
        let nodes = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
        let node = nodes.and_then(|nodes| nodes.trim().split([',', '-']).next());
        let Some(node) = node.and_then(|node| node.parse().ok()) else { return };
        let mut bytes = vec![0; 1 << 20];
        let middle = bytes.as_ptr().addr() + bytes.len() / 2;
        for (nodes, mode) in [(vec![node], "prefer"), (vec![node; 2], "interleave")] {
            if place(&mut bytes, &nodes).is_err() {
                return; // the system refuses it, as containers do
            }
            bytes.fill(1);
            let Some(policy) = policy_at(middle) else { return };
            assert!(policy.starts_with(mode) && policy.ends_with(&format!(":{node}")), "{policy}");
        }
    }
}
