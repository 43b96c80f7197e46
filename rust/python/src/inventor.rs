//! An executor that computes nothing and makes up everything it reports, by rules that tests know: what a consumer gets
//! of log probabilities, logits and hidden states can be told to the last bit.
//!
//! The next token after `position` is `position + seed`. The log probability of a token is minus a hundredth of its
//! position, the likeliest tokens are the ids from 0, and both rows say the position first and then the seed.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Sender, unbounded};
use penstock_engine::Completions;
use penstock_engine::request::{PromptPosition, Request, Token, TokenDetails};
use penstock_engine::{Executor, RowOutput, ScheduledRow, StepDone, StepOutput, StepPlan};
use penstock_types::OutputScope;

type Step = (Box<StepPlan>, Box<StepOutput>);

/// Hands plans to the thread that makes their answers up.
pub struct Inventor(Sender<Step>);

impl Inventor {
    /// For an engine whose answers go by `completions`.
    pub fn start(completions: Completions) -> Self {
        let (steps, submitted) = unbounded::<Step>();
        thread::spawn(move || {
            let mut slots = HashMap::new();
            for (plan, mut output) in submitted {
                answer(&plan, &mut output, &mut slots);
                completions.send(StepDone { plan, output, result: Ok(()) });
            }
        });
        Self(steps)
    }
}

impl Executor for Inventor {
    fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
        self.0.send((plan, output)).expect("the thread ends with the channel; this is a bug");
    }
}

fn answer(plan: &StepPlan, output: &mut StepOutput, slots: &mut HashMap<u32, Arc<Request>>) {
    slots.extend(plan.new_sequences.iter().map(|seat| (seat.slot, Arc::clone(&seat.request))));
    output.copies_done = true;
    for work in &plan.rows {
        let request = &*slots[&work.slot];
        output.positions.extend(work.prompt_outputs.clone().map(|position| PromptPosition {
            logprob: logprob(position + 1),
            details: details(request, position, request.outputs.prompt_logprobs, OutputScope::has_prompt),
        }));
        output.sampled.extend(work.sample.map(|sample| {
            // With the first token comes the last row of the prompt.
            let is_told = |extent: OutputScope| extent.has_generation() || sample.index == 0;
            let position = last_position(work);
            Token {
                id: position + request.sampling.seed as u32,
                logprob: logprob(position + 1),
                details: details(request, position, request.outputs.logprobs, is_told),
            }
        }));
        output.rows.push(RowOutput {
            num_tokens: u32::from(work.sample.is_some()),
            num_positions: work.prompt_outputs.len() as u32,
            ..RowOutput::default()
        });
    }
}

fn last_position(work: &ScheduledRow) -> u32 {
    work.start + work.num_tokens - 1
}

fn logprob(position: u32) -> f32 {
    position as f32 * -0.01
}

fn details(
    request: &Request,
    position: u32,
    num_likeliest: Option<u32>,
    is_told: impl Fn(OutputScope) -> bool,
) -> Option<Box<TokenDetails>> {
    let row = |extent: Option<OutputScope>, width: usize| match extent {
        Some(extent) if is_told(extent) => {
            let mut row = vec![0.0; width];
            row[..2].copy_from_slice(&[position as f32, request.sampling.seed as f32]);
            row
        }
        _ => Vec::new(),
    };
    Some(Box::new(TokenDetails {
        top: (0..num_likeliest.unwrap_or(0)).map(|id| (id, id as f32 * -0.5)).collect(),
        logits: row(request.outputs.logits, 5),
        hidden_state: row(request.outputs.hidden_states, 3),
    }))
}
