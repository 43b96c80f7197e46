//! The books of the KV cache: which block holds whose tokens. Numbers only; the bytes live in the executor.
//!
//! ```text
//! pool    free ─take─▶ list of a sequence ─give_back─▶ free     a block in several lists is freed by the last of them
//!         └ some of the free blocks are promised to lists that may still grow
//! ```

mod list;
mod pool;

pub use list::BlockList;
pub use pool::BlockPool;
