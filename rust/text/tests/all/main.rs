//! Text: encoding, incremental decoding, stop strings and sequences, output parsers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod encoding;
mod formats;
mod parser_properties;
mod parser_support;
mod parsers;
mod reader;
mod stop_sequences;
mod stop_strings;
mod streaming;
mod untrusted_files;
mod vocabularies;
