//! Every algorithm once, over any instruction set and any element type.
//!
//! `arch` compiles these into functions with target features. They take raw parts that `kernels` and `attention`
//! (the safe fronts) have checked, and they never decide who runs what.

pub(crate) mod attention;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod reduce;
pub(crate) mod row_ops;
pub(crate) mod storage;
pub(crate) mod tile;
