//! The engine core without a thread, by random schedules and by single behaviours; the engine with threads; and the KV
//! cache manager against a naive reference.

#![cfg(not(feature = "loom"))]
#![allow(clippy::unwrap_used)]

mod adapters;
mod choices;
mod clients;
mod deadlines;
mod device;
mod drafts;
mod finish;
mod forks;
mod harness;
mod kv_cache;
mod kv_events;
mod mirror;
mod oracle;
mod paused;
mod preemption;
mod prefix_reuse;
mod prompt_outputs;
mod random;
mod scale;
mod scheduling;
mod shutdown;
mod simulation;
mod stats;
mod threaded;
mod threads;
