//! CPU kernels of Penstock: SIMD leaf functions over slices, and the worker pool that runs them.
//!
//! Slices go in, slices come out. Nothing here knows tensors, models or requests, and nothing allocates on a call
//! path. Callers pick a [`Kernels`] table once, build one [`Pool`], and pass both down:
//!
//! ```
//! use penstock_kernels::{Kernels, Matrix, MatrixLayout, Pool};
//! use penstock_types::{Dtype, Epilogue};
//!
//! let (kernels, pool) = (Kernels::best(), Pool::new(2)?);
//! let layout = MatrixLayout { rows: 3, columns: 2, dtype: Dtype::Bf16 };
//! let mut bytes = vec![0; layout.bytes()];
//! layout.pack_panel(0, &[1.0, 0.0, 0.0, 1.0, 2.0, 2.0], &mut bytes);
//! let mut out = [0.0; 3];
//! let matrix = Matrix { layout, bytes: &bytes };
//! kernels.matmul(&pool, &[5.0, 7.0], 1, matrix, Epilogue::Store, &mut out);
//! assert_eq!(out, [5.0, 7.0, 24.0]);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # The law
//!
//! For a given [`Isa`] every output element is one fixed sequence of roundings. It does not depend on how many
//! tokens share a call, on tiles, blocks or chunks, or on the number of threads; so a request gets the same bits
//! alone and in any company. Each kernel's header says which sequence it is.
//!
//! # The code
//!
//! `simd` is the vector alphabet (always 16 lanes), `generic` holds each algorithm once, `arch` turns the algorithms
//! into a function table per instruction set, and [`mod@reference`] is the slow twin that every table is tested against.

mod arch;
mod attention;
mod generic;
mod isa;
mod kernels;
mod kv;
mod matrix;
mod panel;
mod pool;
mod quantiser;
pub mod reference;
mod rows;
mod simd;

pub use attention::{SPLIT, attention_scratch};
pub use isa::{Isa, IsaError};
pub use kernels::Kernels;
pub use kv::KvLayout;
pub use matrix::{Matrix, MatrixLayout};
pub use pool::Pool;
pub use rows::{Rows, RowsMut};
