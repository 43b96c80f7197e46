//! Output parsers: separate reasoning, content and tool calls in a model's text while it is streamed.
//!
//! ```text
//! text ── reasoning ──> the rest ── answer ──> content
//!             └─> reasoning             └─> calls: a name, then arguments piece by piece
//! ```
//!
//! The formats are data: `table.rs` has the rows, and the parsers read them.
//!
//! Parsing never fails: text that turns out not to be a call is returned as content, unchanged. The concatenated deltas
//! depend only on the text, not on how it was divided. Every byte is read a bounded number of times. Held back are only
//! a possible prefix of a marker, up to [`MAX_HELD_WHITESPACE`] bytes of whitespace before it, and a call until its
//! name is known and its arguments start.
//!
//! Whitespace on either side of a marker is removed. Inside arguments every character is kept.

mod answer;
mod arguments;
mod call_reader;
mod call_text;
mod delta;
mod detection;
mod header_reader;
mod json_reader;
#[cfg(test)]
mod linear_time;
mod literal;
mod literal_reader;
mod markers;
mod names;
mod output_parser;
mod reasoning;
mod table;
mod tagged_reader;
mod typing;
mod visits;

pub use delta::Delta;
pub use detection::detect;
pub use markers::MAX_HELD_WHITESPACE;
pub use output_parser::OutputParser;
pub use table::{reasoning_format, tool_format};
pub use typing::ToolSchemas;
