//! An executor without a model, for tests. Its outputs follow rules that tests know, so that they can be compared bit
//! by bit.
//!
//! The token after `position` is `position + seed`. The log probability of a token is -0.01 times its position, the
//! most likely tokens are the ids from 0, and rows of tensors start with the position and the seed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use penstock_engine::request::{PromptPosition, Request};
use penstock_engine::{
    Completions, Executor, NewSequence, RowOutput, ScheduledRow, StepDone, StepOutput, StepPlan,
};
use penstock_types::OutputScope;
use penstock_types::{Token, TokenDetails};

type Step = (Box<StepPlan>, Box<StepOutput>);

/// Sends the plans to a thread that computes the outputs.
pub struct FakeExecutor(Sender<Step>);

impl FakeExecutor {
    /// An executor that reports finished steps to `completions`.
    pub fn start(completions: Completions) -> Self {
        let (sender, steps) = channel::<Step>();
        thread::spawn(move || {
            let mut slots = HashMap::new();
            for (plan, mut output) in steps {
                compute(&plan, &mut output, &mut slots);
                completions.send(StepDone { plan, output, result: Ok(()) });
            }
        });
        Self(sender)
    }
}

impl Executor for FakeExecutor {
    fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
        self.0.send((plan, output)).expect("the thread ends with the channel; this is a bug");
    }
}

fn compute(plan: &StepPlan, output: &mut StepOutput, slots: &mut HashMap<u32, Arc<Request>>) {
    for NewSequence { slot, request, choice, .. } in &plan.new_sequences {
        slots.insert(*slot, Arc::new(request.of_choice(*choice)));
    }
    output.copies_done = true;
    for row in &plan.rows {
        let request = &*slots[&row.slot];
        output.positions.extend(row.prompt_outputs.clone().map(|position| PromptPosition {
            logprob: logprob(position + 1),
            details: details(request, position, request.outputs.prompt_logprobs, OutputScope::has_prompt),
        }));
        output.sampled.extend(row.sample.map(|sample| {
            // The first token has the outputs of the prompt's last position.
            let is_covered = |scope: OutputScope| scope.has_generation() || sample.index == 0;
            let position = last_position(row);
            Token {
                id: position + request.sampling.seed as u32,
                logprob: logprob(position + 1),
                details: details(request, position, request.outputs.logprobs, is_covered),
            }
        }));
        output.rows.push(RowOutput {
            num_tokens: u32::from(row.sample.is_some()),
            num_positions: row.prompt_outputs.len() as u32,
            ..RowOutput::default()
        });
    }
}

fn last_position(row: &ScheduledRow) -> u32 {
    row.start + row.num_tokens - 1
}

fn logprob(position: u32) -> f32 {
    position as f32 * -0.01
}

fn details(
    request: &Request,
    position: u32,
    num_top: Option<u32>,
    is_covered: impl Fn(OutputScope) -> bool,
) -> Option<Box<TokenDetails>> {
    let values = |scope: Option<OutputScope>, width: usize| match scope {
        Some(scope) if is_covered(scope) => {
            let mut values = vec![0.0; width];
            values[..2].copy_from_slice(&[position as f32, request.sampling.seed as f32]);
            values
        }
        _ => Vec::new(),
    };
    Some(Box::new(TokenDetails {
        top: (0..num_top.unwrap_or(0)).map(|id| (id, id as f32 * -0.5)).collect(),
        logits: values(request.outputs.logits, 5),
        hidden_state: values(request.outputs.hidden_states, 3),
        embedding: values(request.outputs.embeddings, 2),
    }))
}
