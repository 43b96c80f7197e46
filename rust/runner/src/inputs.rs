//! From a [`StepPlan`] to the flat arrays a device reads.

use penstock_device::{Backend, StepInputs};
use penstock_engine::executor::{StepPlan, Work};
use penstock_models::Decoder;

/// Writes `plan` into `inputs`. `latest` holds the token sampled last for each slot.
pub(crate) fn build<B: Backend>(
    decoder: &Decoder<B>,
    plan: &StepPlan,
    latest: &[u32],
    block_size: usize,
    inputs: &mut StepInputs,
) {
    inputs.clear();
    for work in &plan.work {
        let blocks = &plan.blocks[work.blocks.start as usize..work.blocks.end as usize];
        inputs.blocks.extend(blocks.iter().map(|block| block.0));
        let (start, prompt_len) = (work.start as usize, work.prompt_len as usize);
        let tokens = input_tokens(plan, work, latest).iter().copied();
        decoder.push_sequence(inputs, tokens, start, prompt_len, blocks.len(), block_size);
        if work.sample.is_some() {
            inputs.output_rows.push(inputs.tokens.len() as u32 - 1);
        }
    }
}

fn input_tokens<'a>(plan: &'a StepPlan, work: &Work, latest: &'a [u32]) -> &'a [u32] {
    if work.follows_sample {
        std::slice::from_ref(&latest[work.slot as usize])
    } else {
        &plan.tokens[work.tokens.start as usize..work.tokens.end as usize]
    }
}
