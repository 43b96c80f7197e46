//! The output side of a request: from the engine's events to text, parsed content and results.
//!
//! ```text
//! result queue, one per choice ── ChoiceOutput ── RequestState ── Chunk, RequestOutput
//!                                 ├─ TokenOutput     tokens and logprobs, in columns
//!                                 ├─ OutputText      text: detokenisation, stop strings, parsing
//!                                 ├─ StopChecker     when the output ends
//!                                 └─ PositionTensors logits, hidden states, embeddings
//! ```
//!
//! A Listener receives for the requests of a port: only for those choices that have new events.

mod choice_output;
mod float_array;
mod listener;
mod output_text;
mod parsed_output;
mod position_tensors;
mod request_state;
mod result_values;
mod results;
mod stop_checker;
mod text_buffer;
mod token_output;

pub use float_array::FloatArray;
pub use listener::Listener;
pub use output_text::{Echo, OutputFormats, OutputOptions};
pub use request_state::{Milestone, RequestState};
#[rustfmt::skip]
mod result_types;
pub use result_types::{Choice, Chunk, RequestOutput, Score, Timings, ToolCall, ToolCallDelta, Usage};
pub use result_values::{StopReason, TopLogprobs};
pub use stop_checker::{ChoiceEnd, Ending, StopChecker};
