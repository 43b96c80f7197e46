//! Models: loading of weights, adapters.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapters;
mod common;
mod loading;
