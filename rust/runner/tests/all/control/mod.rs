//! Prompt outputs, drafts, grammars, processors and all of them together, on a tiny model.

mod drafts;
mod grammars;
mod late_masks;
mod processors;
mod profile;
mod prompts;
mod rules;
mod slots;
mod steps;
mod together;

use penstock_device::cpu::Cpu;

/// The backend under test.
type Device = Cpu;

fn device(threads: usize) -> Device {
    Cpu::new(threads).unwrap()
}
