//! How much host memory can still be had.

use std::fs;

/// Bytes this process can still take: the least of what the system says is available, what its control group leaves, and
/// what is left of its address space (`ulimit -v`). Where none of them says anything, no limit is known.
pub(super) fn available() -> u64 {
    let limits = [system_available(), group_available(), address_space_available()];
    limits.into_iter().flatten().min().unwrap_or(u64::MAX)
}

fn system_available() -> Option<u64> {
    parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<u64> {
    parse_kilobytes(text, "MemAvailable:")
}

/// The bytes of a line such as `VmSize:   2048 kB`.
fn parse_kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn address_space_available() -> Option<u64> {
    let limit = parse_address_space(&fs::read_to_string("/proc/self/limits").ok()?)?;
    let used = parse_kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(limit.saturating_sub(used))
}

/// The soft limit; `None` where it says `unlimited`.
fn parse_address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Version 2 control groups; inside a container their files are at the root of the mount.
fn group_available() -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    // Files that were read count as used until somebody needs the room: the model's own, for a start.
    let reclaimable = read("memory.stat").map_or(0, |stat| parse_file_cache(&stat));
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

fn parse_file_cache(stat: &str) -> u64 {
    let bytes = |name: &str| {
        let value = |line: &str| line.strip_prefix(name)?.trim().parse::<u64>().ok();
        stat.lines().find_map(value).unwrap_or(0)
    };
    bytes("inactive_file ") + bytes("active_file ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_read_in_bytes() {
        assert_eq!(parse_meminfo("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2048 * 1024));
        assert_eq!(parse_meminfo("MemTotal: 9 kB\n"), None);
        assert!(available() > 0);
        let limits = |soft: &str| {
            format!("Limit  Soft Limit  Hard Limit  Units\nMax address space  {soft}  unlimited  bytes\n")
        };
        assert_eq!(parse_address_space(&limits("4096")), Some(4096));
        assert_eq!(parse_address_space(&limits("unlimited")), None);
        assert_eq!(parse_file_cache("anon 7\ninactive_anon 5\nactive_file 30\ninactive_file 12\n"), 42);
        assert_eq!(parse_file_cache(""), 0);
    }
}
