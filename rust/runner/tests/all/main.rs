//! Models that are opened, converted and run in steps, on the CPU and on an asynchronous backend.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::duplicate_mod, reason = "two backends run the tests of `control`")]

mod asynchronous;
mod common;
mod control;
mod converted;
mod launch;
