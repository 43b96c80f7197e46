//! The control suite on an asynchronous backend, and the independence of launches from the tokens of earlier steps.

mod async_cpu;
#[path = "../control/drafts.rs"]
mod drafts;
#[path = "../control/grammars.rs"]
mod grammars;
#[path = "../control/late_masks.rs"]
mod late_masks;
mod overlap;
#[path = "../control/processors.rs"]
mod processors;
#[path = "../control/prompts.rs"]
mod prompts;
#[path = "../control/rules.rs"]
mod rules;
#[path = "../control/slots.rs"]
mod slots;
#[path = "../control/steps.rs"]
mod steps;
#[path = "../control/together.rs"]
mod together;

/// The backend under test.
type Device = async_cpu::AsyncCpu;

fn device(threads: usize) -> Device {
    async_cpu::AsyncCpu::new(threads).0
}
