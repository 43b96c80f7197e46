//! The memory limits of control groups: that of the group of this process and those of all groups above it.
//!
//! ```text
//! /proc/self/cgroup      0::/a/b          version 2   /sys/fs/cgroup/a/b, .../a and the mount itself
//!                        4:memory:/a/b    version 1   /sys/fs/cgroup/memory/a/b, likewise
//! ```
//!
//! In a container the path may be the host's while the mount is the container's own: missing files are ignored, and the
//! files at the mount are those of the container's group.

use std::fs;
use std::path::Path;

use super::{AvailableMemory, MemoryLimit};

/// The mount point of a version, and the names of its files and of lines in `memory.stat`.
#[derive(Debug)]
struct Version {
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    file_cache: [&'static str; 2],
}

const ONE: Version = Version {
    mount: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    file_cache: ["total_inactive_file ", "total_active_file "],
};
const TWO: Version = Version {
    mount: "/sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    file_cache: ["inactive_file ", "active_file "],
};

/// The memory that is available under all limits; `None` if there is no limit.
pub(super) fn available() -> Option<AvailableMemory> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_else(|_| "0::/".to_owned());
    lowest_available(&groups, |file| fs::read_to_string(file).ok())
}

/// The memory of the group that has the least available, of those listed in `groups`. `read` reads their files.
fn lowest_available(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<AvailableMemory> {
    let mut available: Option<AvailableMemory> = None;
    for (version, path) in groups.lines().filter_map(parse_group) {
        for group in Path::new(path).ancestors() {
            let directory = Path::new(version.mount).join(group.strip_prefix("/").unwrap_or(group));
            let here = version.available(&directory, |name| read(&directory.join(name)));
            available = available.into_iter().chain(here).reduce(AvailableMemory::at_most);
        }
    }
    available
}

/// The memory group of a line `number:controllers:path`; version 2 names no controllers.
fn parse_group(line: &str) -> Option<(&'static Version, &str)> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    if controllers.split(',').any(|controller| controller == "memory") {
        return Some((&ONE, path));
    }
    (number == "0" && controllers.is_empty()).then_some((&TWO, path))
}

impl Version {
    /// The memory that is available in the group of a directory, whose files `read` reads by name.
    fn available(&self, directory: &Path, read: impl Fn(&str) -> Option<String>) -> Option<AvailableMemory> {
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let (bytes, used) = (number(self.limit)?, number(self.used)?);
        // The page cache counts as used though it can be reclaimed; the model's own files are part of it.
        let reclaimable = read("memory.stat").map_or(0, |stat| self.parse_file_cache(&stat));
        let setting = directory.join(self.limit).display().to_string();
        let limit = MemoryLimit { subject: "the memory of the control group", setting, bytes };
        Some(limit.available(used.saturating_sub(reclaimable)))
    }

    fn parse_file_cache(&self, stat: &str) -> u64 {
        let bytes = |name: &str| {
            let value = |line: &str| line.strip_prefix(name)?.trim().parse::<u64>().ok();
            stat.lines().find_map(value).unwrap_or(0)
        };
        self.file_cache.into_iter().map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory that is available in `groups` if only these files exist.
    fn memory_in(groups: &str, files: &[(&str, &str)]) -> Option<AvailableMemory> {
        lowest_available(groups, |file| {
            let (_, text) = files.iter().find(|(name, _)| Path::new(name) == file)?;
            Some((*text).to_owned())
        })
    }

    fn available_in(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        memory_in(groups, files).map(|available| available.bytes)
    }

    #[test]
    fn tightest_limit_of_group_and_parents_counts() {
        let files = [
            ("/sys/fs/cgroup/a/memory.max", "5000\n"),
            ("/sys/fs/cgroup/a/memory.current", "4500\n"),
            ("/sys/fs/cgroup/a/memory.stat", "anon 7\ninactive_anon 5\nactive_file 30\ninactive_file 12\n"),
            ("/sys/fs/cgroup/a/b/memory.max", "3000\n"),
            ("/sys/fs/cgroup/a/b/memory.current", "100\n"),
            ("/sys/fs/cgroup/a/c/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/c/memory.current", "100\n"),
        ];
        assert_eq!(available_in("0::/a/b\n", &files), Some(500 + 42));
        assert_eq!(available_in("0::/a/c\n", &files), Some(542), "the group itself has no limit");
        let limit = memory_in("0::/a/b\n", &files).and_then(|available| available.limit).expect("a limit");
        assert_eq!((limit.setting.as_str(), limit.bytes), ("/sys/fs/cgroup/a/memory.max", 5000));
        assert_eq!(available_in("0::/\n", &files), None);
        assert_eq!(available_in("0::/a/b\n", &files[3..]), Some(2900), "no memory.stat");
        assert_eq!(available_in("", &files), None);
    }

    #[test]
    fn both_versions_can_be_mounted() {
        let files = [
            ("/sys/fs/cgroup/memory/job:1/memory.limit_in_bytes", "9000\n"),
            ("/sys/fs/cgroup/memory/job:1/memory.usage_in_bytes", "1000\n"),
            (
                "/sys/fs/cgroup/memory/job:1/memory.stat",
                "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 300\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "12345\n"),
            ("/sys/fs/cgroup/memory.max", "700\n"),
            ("/sys/fs/cgroup/memory.current", "100\n"),
        ];
        let first = "5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/job:1\n1:name=systemd:/init\n";
        assert_eq!(available_in(first, &files), Some(8500));
        assert_eq!(available_in(&format!("{first}0::/job\n"), &files), Some(600));
        assert_eq!(available_in("4:memory:/docker/of-the-host\n", &files[..3]), None);
        assert_eq!(
            available_in("4:memory:/docker/of-the-host\n", &files[3..5]),
            Some(9223372036854771712 - 12345)
        );
    }
}
