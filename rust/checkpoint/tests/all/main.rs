//! Model files: directories, GGUF files, quantised and damaged ones, adapters.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapter;
mod common;
mod directory;
mod gguf;
mod hostile;
mod packed;
mod quantised;
