//! Text and token ids: tokenizer, incremental detokenizer, stop strings, output parsers.
//!
//! [`Tokenizer`] encodes prompts, from a `tokenizer.json` or from the vocabulary of a GGUF file, to the same ids as the
//! Hugging Face libraries. [`TextStream`] decodes the ids of a running request incrementally: it emits only complete
//! characters, finds stop strings, and holds back only text that may still become part of one. [`parsers`] separate
//! reasoning and tool calls from content.
//!
//! All of it takes time linear in the text. The crate knows nothing of requests, engines or Python.

#![allow(missing_docs)]

mod detokenizer;
mod encode_check;
mod error;
mod expression;
mod expression_limits;
mod gguf;
mod model;
mod normalizer;
mod options;
pub mod parsers;
mod pipeline;
mod splitter;
mod stop_sequences;
mod stop_strings;
mod stream;
mod token_table;
mod tokenizer;
mod tokenizer_config;

pub use error::TextError;
pub use options::TextOptions;
pub use stop_sequences::StopSequences;
pub use stop_strings::{MAX_STOP_BYTES, StopMatch};
pub use stream::TextStream;
pub use tokenizer::{TokenBytes, Tokenizer};
