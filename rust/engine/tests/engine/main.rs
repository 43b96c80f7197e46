//! The engine from outside: its core by random schedules and by single behaviours, without a thread; then with real
//! threads; and the block pool against a naive twin.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

mod choices;
mod device;
mod drafts;
mod ends;
mod harness;
mod kv_cache;
mod memory;
mod oracle;
mod random;
mod reports;
mod scheduling;
mod sharing;
mod simulation;
mod threads;
