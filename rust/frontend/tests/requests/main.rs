//! Whole requests without an interpreter, on an engine with a scripted model.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod beams;
mod listener;
mod output;
mod prompt;
mod support;
