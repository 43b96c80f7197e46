//! Structured output of Penstock: grammars to token masks.
//!
//! A [`Vocabulary`] is made once per model, a [`Compiler`] once per vocabulary. The compiler turns a [`Grammar`], a
//! JSON schema for example, into something [`Compiled`]; each sequence walks through that with a [`Guide`], which says
//! before every token which ones may come. The parsing is llguidance's; what is here makes it safe to hand it what
//! strangers send.
//!
//! Grammars are hostile. Sources are measured in linear time before anything recursive sees them, every stage is
//! bounded by counts of work rather than by a clock, and what goes wrong is a typed error of one request: a panic of
//! the library is caught, a compilation that overruns its time is left behind on its own thread, a mask that takes too
//! much ends its own sequence. Nothing is ever fetched.
//!
//! Nothing here knows of requests, engines or devices.

mod build;
mod cache;
mod compiler;
mod error;
mod grammar;
mod guide;
mod lark;
mod library;
mod limits;
mod scan;
mod schema;
mod vocabulary;

pub use compiler::{CacheUse, Compiler};
pub use error::GuidanceError;
pub use grammar::{Grammar, ToolCalls};
pub use guide::{Compiled, Guide};
pub use limits::Limits;
pub use vocabulary::{Encode, TokenText, Vocabulary};
