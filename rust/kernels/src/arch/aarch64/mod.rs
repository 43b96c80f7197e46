//! The instruction sets of 64-bit Arm.

mod dot;
pub(crate) mod neon;

pub(crate) use dot::{DOTPROD, I8MM};
pub(crate) use neon::NEON;
