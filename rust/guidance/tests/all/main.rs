//! Grammars: compilation, masks, hostile sources, random texts and replays.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod compiler;
mod gbnf;
mod hostile;
mod masks;
mod random_schemas;
mod random_texts;
mod replay;
mod schemas;
