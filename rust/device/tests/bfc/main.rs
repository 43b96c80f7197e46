//! The allocator from outside: its rules by example, the same against a naive model on random requests, and a day of serving.

mod examples;
mod model;
mod properties;
mod serving;
