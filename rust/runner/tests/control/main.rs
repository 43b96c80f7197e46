//! What a request can ask of its tokens, on a tiny model: prompts that are reported on, drafts, grammars, processors, and all
//! of it together, side by side with others.

#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod drafts;
mod grammars;
mod processors;
mod prompts;
mod rules;
mod seats;
mod steps;
mod together;
