//! Paged attention: correct (against the reference) and deterministic (same bits for every chunking, batch and
//! division).

#![allow(clippy::unwrap_used)]

mod bits;
mod case;
#[path = "../common/mod.rs"]
mod common;
mod limits;
