//! One request, from its parameters to its output. The interpreter is not known here.
//!
//! [`params`] reads and checks the parameters, refuses those that conflict, and resolves them with the model's
//! defaults. [`prompt`] tokenises the prompt, compiles the grammar that the parameters ask for, and starts the request.
//! [`output`] turns the engine's events into text, parsed content and results. [`selection`] has beam search,
//! `best_of`, scores and embeddings, [`config`] the configuration of an engine, [`kv_events`] the messages for
//! routers. `definitions/` has an entry for each
//! parameter, engine option, statistic and field of a result; tools/generate writes the code that repeats them.

#![allow(missing_docs)]

pub mod adapters;
pub mod config;
mod error;
#[cfg(feature = "testing")]
mod fake_executor;
pub mod field;
#[cfg(test)]
mod json_value;
pub mod kv_events;
pub mod output;
pub mod panics;
pub mod params;
pub mod prompt;
pub mod selection;
pub mod value;

pub use error::Error;
#[cfg(feature = "testing")]
pub use fake_executor::FakeExecutor;
