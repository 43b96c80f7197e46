//! The instruction sets of x86-64, one file each.

pub(crate) mod avx2;
pub(crate) mod avx512;
