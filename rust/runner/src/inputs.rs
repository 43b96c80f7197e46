//! From a [`StepPlan`] to the flat arrays of [`StepInputs`].

use penstock_device::{AdapterRows, Backend, FOLLOWS, StepInputs};
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
        let first = inputs.tokens.len();
        if row.follows_sample {
            let last = std::iter::once(FOLLOWS | row.slot);
            decoder.push_sequence(inputs, last, start, prompt_len, blocks.len(), block_size);
        } else {
            let tokens = plan.tokens[row.tokens.start as usize..row.tokens.end as usize].iter().copied();
            decoder.push_sequence(inputs, tokens, start, prompt_len, blocks.len(), block_size);
        }
        if let Some(adapter) = row.adapter {
            let end = inputs.tokens.len();
            match inputs.adapters.last_mut() {
                Some(rows) if rows.adapter == adapter => rows.rows.end = end,
                _ => inputs.adapters.push(AdapterRows { rows: first..end, adapter }),
            }
        }
    }
}
