//! The prompt side of a request: from text or token ids, and from the parameters that depend on the tokenizer, to the
//! engine's request.
//!
//! ```text
//! Prompt ── tokenise ──────────────────────────> token ids ──┐
//! SamplingParams ── resolve ───────────────────> Sampling ───┤ PreparedRequest ── start ──> RequestState
//!                ├─ bad_words ─ tokenise ──────> sequences ──┤
//!                └─ requested_grammar, compile > Grammar ────┘
//! ```

mod bad_words;
mod formats;
mod grammar_spec;
mod grammars;
mod prepare;

pub use formats::ModelFormats;
pub use grammars::Grammars;
pub use penstock_guidance::Caller;
pub use prepare::{Frontend, Mode, PreparedRequest, Prompt};
