//! Every algorithm once, generic over the instruction set and the dtype.
//!
//! `arch` compiles these into functions with target features. They take raw pointers that the safe interfaces
//! (`kernels` and `attention`) have checked. Scheduling the work on threads is not their concern.

pub(crate) mod attention;
pub(crate) mod grid;
pub(crate) mod low_rank;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod panel_dtype;
pub(crate) mod reduce;
pub(crate) mod row_ops;
pub(crate) mod tile;
