//! The kernels of every instruction set against their references, and the worker pool.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attention;
mod bounds;
mod common;
mod grid;
mod kv_cache;
mod low_rank;
mod matmul;
mod packed_layout;
mod pool;
mod rope_write_kv;
mod row_ops;
