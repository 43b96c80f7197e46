//! The available memory on Linux.

use std::fs;

use super::{AvailableMemory, MemoryLimit, cgroups, parse_kilobytes};

/// Bytes available to this process: the lowest of the system's available memory, its commit limit (without overcommit),
/// the limits of control groups and that of the address space (`ulimit -v`).
pub(crate) fn available_memory() -> AvailableMemory {
    let limits = [commit_available(), cgroups::available(), address_space_available()];
    limits.into_iter().flatten().fold(system_available().into(), AvailableMemory::at_most)
}

/// The memory that the system can provide without swapping; the free memory where /proc is not mounted.
fn system_available() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").ok();
    meminfo.and_then(|meminfo| parse_meminfo(&meminfo)).unwrap_or_else(free_memory)
}

/// The memory that holds nothing.
fn free_memory() -> u64 {
    // SAFETY: the structure consists of numbers, for which zero is valid.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one structure. The call fails for an invalid address only.
    unsafe { libc::sysinfo(&mut info) };
    info.freeram as u64 * u64::from(info.mem_unit)
}

fn parse_meminfo(text: &str) -> Option<u64> {
    parse_kilobytes(text, "MemAvailable:")
}

fn commit_available() -> Option<AvailableMemory> {
    let policy = fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()?;
    parse_commit(&policy, &fs::read_to_string("/proc/meminfo").ok()?)
}

/// The remaining part of the commit limit; `None` unless the overcommit policy is 2 (never).
fn parse_commit(policy: &str, meminfo: &str) -> Option<AvailableMemory> {
    if policy.trim() != "2" {
        return None;
    }
    let bytes = parse_kilobytes(meminfo, "CommitLimit:")?;
    let subject = "the memory that the system commits to";
    let limit = MemoryLimit { subject, setting: "vm.overcommit_memory=2".to_owned(), bytes };
    Some(limit.available(parse_kilobytes(meminfo, "Committed_AS:")?))
}

fn address_space_available() -> Option<AvailableMemory> {
    let bytes = parse_address_space(&fs::read_to_string("/proc/self/limits").ok()?)?;
    let used = parse_kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    let subject = "the address space of the process";
    Some(MemoryLimit { subject, setting: "ulimit -v".to_owned(), bytes }.available(used))
}

/// The soft limit; `None` if it is `unlimited`.
fn parse_address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert_eq!(parse_meminfo("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2048 * 1024));
        assert_eq!(parse_meminfo("MemTotal: 9 kB\n"), None);
        assert!(available_memory().bytes > 0 && free_memory() > 0);
        let limits = |soft: &str| {
            format!("Limit  Soft Limit  Hard Limit  Units\nMax address space  {soft}  unlimited  bytes\n")
        };
        assert_eq!(parse_address_space(&limits("4096")), Some(4096));
        assert_eq!(parse_address_space(&limits("unlimited")), None);
    }

    #[test]
    fn commit_limit_counts_without_overcommit() {
        let meminfo = "MemAvailable: 9 kB\nCommitLimit:     100 kB\nCommitted_AS:     30 kB\n";
        let bytes = |policy, meminfo| parse_commit(policy, meminfo).map(|available| available.bytes);
        assert_eq!(bytes("2\n", meminfo), Some(70 * 1024));
        assert_eq!(bytes("0\n", meminfo), None);
        assert_eq!(bytes("2\n", "CommitLimit: 3 kB\nCommitted_AS: 4 kB\n"), Some(0));
        assert_eq!(bytes("2\n", "MemAvailable: 9 kB\n"), None);
    }
}
