//! The options of an engine as a caller gives them.

mod kv_events;
mod quantization;
mod readers;
#[rustfmt::skip]
mod set;

pub use set::set;
