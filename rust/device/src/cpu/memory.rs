//! Host memory: large zeroed regions, and how much of it can still be had.

use std::fs;

use memmap2::MmapMut;

use crate::backend::DeviceError;

/// A page-aligned region of zeroes. Pages cost memory once they are touched, so a KV cache grows with its use. Refusal by
/// the operating system is an error, never an abort.
pub(crate) fn zeroed(what: &'static str, bytes: usize) -> Result<MmapMut, DeviceError> {
    MmapMut::map_anon(bytes.max(1)).map_err(|error| DeviceError::OutOfMemory {
        what,
        bytes: bytes as u64,
        reason: error.to_string(),
    })
}

/// Bytes this process can still take: what the system says is available, and what its control group leaves. Where
/// neither says anything, no limit is known.
pub(crate) fn available() -> u64 {
    system_available().unwrap_or(u64::MAX).min(group_available().unwrap_or(u64::MAX))
}

fn system_available() -> Option<u64> {
    parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
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
        assert_eq!(parse_file_cache("anon 7\ninactive_anon 5\nactive_file 30\ninactive_file 12\n"), 42);
        assert_eq!(parse_file_cache(""), 0);
    }

    #[test]
    fn a_region_no_machine_has_is_refused_with_its_size() {
        let error = zeroed("a KV cache", 1 << 60).expect_err("refused").to_string();
        assert!(error.contains(&(1_u64 << 60).to_string()) && error.contains("a KV cache"), "{error}");
    }
}
