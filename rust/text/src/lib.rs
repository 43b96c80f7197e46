//! Text of Penstock: from text to token ids and back.
//!
//! [`Tokenizer`] encodes prompts, out of a `tokenizer.json` or of the vocabulary inside a GGUF file, to the
//! ids that the Hugging Face libraries give. [`TextStream`] turns the ids of one running request back into
//! text as they come: it never shows half a character, finds stop strings, and holds back only what may still
//! become one.
//!
//! [`parsers`] tell reasoning and tool calls from content in that text.
//!
//! Everything is linear in the text, whatever the text is. Nothing here knows of requests, engines or Python;
//! the caller brings ids and takes strings.

mod detokenizer;
mod error;
mod gguf;
pub mod parsers;
mod pieces;
mod recipe;
mod sequences;
mod splitter;
mod stops;
mod stream;
mod tokenizer;

pub use error::TextError;
pub use sequences::StopSequences;
pub use stops::StopMatch;
pub use stream::{TextOptions, TextStream};
pub use tokenizer::{TokenBytes, Tokenizer};
