//! From a [`StepPlan`] to the flat arrays a device reads.

use penstock_device::{Backend, StepInputs};
use penstock_engine::executor::{StepPlan, Work};
use penstock_models::Decoder;

use crate::runner::Slot;

/// Writes `plan` into `inputs`.
pub(crate) fn build<B: Backend>(
    decoder: &Decoder<B>,
    plan: &StepPlan,
    slots: &[Slot],
    block_size: usize,
    inputs: &mut StepInputs,
) {
    inputs.clear();
    for work in &plan.work {
        let blocks = &plan.blocks[work.blocks.start as usize..work.blocks.end as usize];
        inputs.blocks.extend(blocks.iter().map(|block| block.0));
        let (start, prompt_len) = (work.start as usize, work.prompt_len as usize);
        let tokens = input_tokens(plan, work, slots).iter().copied();
        decoder.push_sequence(inputs, tokens, start, prompt_len, blocks.len(), block_size);
        if work.sample.is_some() {
            inputs.output_rows.push(inputs.tokens.len() as u32 - 1);
        }
    }
}

fn input_tokens<'a>(plan: &'a StepPlan, work: &Work, slots: &'a [Slot]) -> &'a [u32] {
    if work.follows_sample {
        slots[work.slot as usize].generated.last().map_or(&[], std::slice::from_ref)
    } else {
        &plan.tokens[work.tokens.start as usize..work.tokens.end as usize]
    }
}
