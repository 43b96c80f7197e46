//! From a [`StepPlan`] to the flat arrays a device reads.

use penstock_device::{Backend, StepInputs};
use penstock_engine::executor::StepPlan;
use penstock_models::Decoder;

use crate::slot::Slot;

/// Writes `plan` into `inputs`, all but the output rows.
pub(crate) fn build<B: Backend>(
    decoder: &Decoder<B>,
    plan: &StepPlan,
    slots: &[Slot],
    block_size: usize,
    inputs: &mut StepInputs,
) {
    inputs.clear();
    for work in &plan.rows {
        let blocks = &plan.blocks[work.blocks.start as usize..work.blocks.end as usize];
        inputs.blocks.extend(blocks.iter().map(|block| block.0));
        let (start, prompt_len) = (work.start as usize, work.prompt_len as usize);
        if work.follows_sample {
            let last = std::iter::once(slots[work.slot as usize].last_token());
            decoder.push_sequence(inputs, last, start, prompt_len, blocks.len(), block_size);
        } else {
            let tokens = plan.tokens[work.tokens.start as usize..work.tokens.end as usize].iter().copied();
            decoder.push_sequence(inputs, tokens, start, prompt_len, blocks.len(), block_size);
        }
    }
}
