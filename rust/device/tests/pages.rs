//! The memory of a buffer. Alone in its process, because it reads the resident memory of the process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use penstock_device::cpu::Cpu;
use penstock_device::{Allocation, Memory};

/// Bytes of the process that are in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    kilobytes.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn allocated_buffer_is_zero_and_takes_memory_when_written() {
    const FLOATS: usize = 16 << 20;
    let mut cpu = Cpu::new(2).unwrap();
    let bytes = cpu.bytes(Allocation::Floats(FLOATS));
    cpu.reserve(bytes).unwrap();
    let before = resident();
    let buffer = cpu.allocate(FLOATS).unwrap();
    assert!(resident().saturating_sub(before) < bytes / 10, "{before} bytes before");
    let mut last = [1.0];
    cpu.download(&buffer, FLOATS - 1, &mut last).unwrap();
    assert_eq!(last, [0.0]);
}
