//! Structured output: grammars compiled to token masks.
//!
//! A [`Vocabulary`] is built once per model, a [`GrammarCompiler`] once per vocabulary. The compiler turns a
//! [`GrammarSpec`], for example a JSON schema, into a [`CompiledGrammar`]. Each sequence has a [`GrammarMatcher`] of
//! its own, which computes the mask of the allowed tokens before each token. Parsing is done by llguidance; this crate
//! makes it safe to pass untrusted grammars to it.
//!
//! Grammars are untrusted input. Sources are measured in linear time before any recursive code reads them. Every stage
//! is limited by counts of work, not by a clock. Failures are typed errors of one request: a panic in the library is
//! caught, a compilation that exceeds its time limit continues on its own thread, a mask that exceeds its limits ends
//! its own sequence. Nothing is ever fetched.
//!
//! This crate knows nothing of requests, engines or devices.

#![allow(missing_docs)]

mod builder;
mod cache;
mod compiler;
mod error;
mod gbnf;
mod grammar;
mod lark;
mod lark_tokens;
mod library;
mod limits;
mod matcher;
mod memory;
mod scan;
mod schema;
mod terminal_chain;
mod turns;
mod vocabulary;
mod watchdog;

pub use compiler::{CacheUsage, Caller, GrammarCompiler};
pub use error::GuidanceError;
pub use grammar::{GrammarSpec, ToolCallSpec, ToolSpec};
pub use limits::GuidanceLimits;
pub use matcher::{CompiledGrammar, GrammarMatcher};
pub use vocabulary::{Encode, TokenText, Vocabulary};
