//! Paged attention: correct (against the reference) and deterministic (same bits for every chunking, batch and
//! division).

mod bits;
pub mod case;
mod limits;
