//! Backends: the CPU, its allocator, sampling, adapters, NUMA nodes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapters;
mod bfc;
mod cpu;
#[cfg(target_os = "linux")]
mod numa;
mod sampling;
