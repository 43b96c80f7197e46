//! Quantised safetensors checkpoints: values and codes against the definition of each layout, and damaged files.

mod errors;
mod fp8;
mod integers;
mod matrix;
