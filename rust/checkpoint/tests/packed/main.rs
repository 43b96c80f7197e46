//! Quantised safetensors checkpoints: values and codes against the definition of each layout, and damaged files.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod errors;
mod fp8;
mod integers;
mod matrix;
