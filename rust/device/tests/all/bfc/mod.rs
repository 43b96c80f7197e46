//! The allocator: examples of its rules, random requests against a reference model, and a serving workload.

mod examples;
mod model;
mod properties;
mod serving;
