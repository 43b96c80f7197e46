//! From a [`StepPlan`] to the flat arrays of [`StepInputs`].

use penstock_device::{Backend, FOLLOWS, StepInputs};
use penstock_engine::StepPlan;
use penstock_models::Decoder;

/// Writes `plan` into `inputs`, except for the output rows.
pub(crate) fn build<B: Backend>(
    decoder: &Decoder<B>,
    plan: &StepPlan,
    block_size: usize,
    inputs: &mut StepInputs,
) {
    inputs.clear();
    for row in &plan.rows {
        let blocks = &plan.blocks[row.blocks.start as usize..row.blocks.end as usize];
        inputs.blocks.extend(blocks.iter().map(|block| block.0));
        let (start, prompt_len) = (row.start as usize, row.prompt_len as usize);
        if row.follows_sample {
            let last = std::iter::once(FOLLOWS | row.slot);
            decoder.push_sequence(inputs, last, start, prompt_len, blocks.len(), block_size);
        } else {
            let tokens = plan.tokens[row.tokens.start as usize..row.tokens.end as usize].iter().copied();
            decoder.push_sequence(inputs, tokens, start, prompt_len, blocks.len(), block_size);
        }
    }
}
