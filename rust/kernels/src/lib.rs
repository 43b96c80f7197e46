//! CPU kernels of Penstock: SIMD leaf functions over slices, and the worker pool that runs them.
//!
//! The functions read and write slices; the crate does not depend on tensors, models or requests, and a call does not
//! allocate. A caller selects a [`Kernels`] table once, builds one [`Pool`], and passes both to every operation:
//!
//! ```
//! use penstock_kernels::{Kernels, Matrix, MatrixLayout, Operand, Pool};
//! use penstock_types::{Dtype, Epilogue};
//!
//! let (kernels, pool) = (Kernels::best(), Pool::new(2)?);
//! let layout = MatrixLayout { rows: 3, columns: 2, format: Dtype::Bf16.into() };
//! let mut bytes = vec![0; layout.bytes()];
//! layout.pack_panel(0, &[1.0, 0.0, 0.0, 1.0, 2.0, 2.0], &mut bytes);
//! let mut out = [0.0; 3];
//! let matrix = Matrix { layout, bytes: &bytes };
//! kernels.matmul(&pool, Operand::Floats(&[5.0, 7.0]), 1, &[matrix], Epilogue::Store, &mut out);
//! assert_eq!(out, [5.0, 7.0, 24.0]);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # Determinism contract
//!
//! For a given [`Isa`], every output element is one fixed sequence of operations and roundings. It does not depend on
//! the number of tokens in the call, on tiles, blocks or chunks, or on the number of threads. So a request gets the
//! same bits alone and in any batch. The header of each kernel states its sequence.
//!
//! # Modules
//!
//! `simd` is the vector trait (always 16 lanes), `generic` has each algorithm once, `arch` compiles the algorithms into
//! a function table per instruction set, and [`mod@reference`] is the reference implementation that every table is
//! tested against.

#![allow(missing_docs)]

mod arch;
mod attention;
mod attention_codes;
mod cores;
mod generic;
mod grid;
mod isa;
mod kernels;
mod kv;
mod low_rank;
mod matmul;
mod matrix;
mod numa;
mod operand;
mod panel;
mod pool;
mod quantiser;
pub mod reference;
mod rope_kv;
mod rotated;
mod rows;
mod simd;
mod weight_quantiser;

pub use attention::{SPLIT, attention_scratch};
pub use attention_codes::AttentionCodes;
pub use cores::usable_cpus;
pub use grid::is_supported;
pub use isa::{Isa, IsaError};
pub use kernels::Kernels;
pub use kv::KvLayout;
pub use low_rank::{LowRank, LowRankRows, low_rank_bytes, pack_low_rank};
pub use matrix::{Matrix, MatrixLayout, PACKED_LAYOUT, PANEL_ROWS};
pub use numa::{allowed_cpus, panels_of_node, place};
pub use operand::{Operand, OperandLayout};
pub use pool::{Pool, Turn};
pub use rope_kv::RopeWriteKv;
pub use rows::{Rows, RowsMut};
pub use weight_quantiser::quantise;
