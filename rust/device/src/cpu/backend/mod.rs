//! The four duties of the CPU.

mod compute;
mod load;
mod memory;
mod sample;

use super::buffers::MOST_PARTS;
use crate::seam::{AdapterSpec, StepSpec};
pub use sample::CpuTicket;

/// Values of a row of the rope table.
fn rotation_width(step: &StepSpec) -> usize {
    step.heads.head_dim / 2 * 2
}

/// Floats of the products with A of all rows: query, key and value have one each.
fn hidden_len(adapters: &AdapterSpec, step: &StepSpec) -> usize {
    step.tokens.saturating_mul(adapters.rank).saturating_mul(MOST_PARTS)
}
