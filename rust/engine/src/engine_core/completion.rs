//! The completion of a step: its outputs are delivered, and the sequences that it ends leave.
//!
//! A failed step ends the sequences in it. Its copies between the KV cache and the host tier count as not made, unless
//! the output says that they are done.

use std::time::Instant;

use super::{EngineCore, InFlightStep, StepBuffers};
use crate::executor::{StepDone, StepError};
use crate::request::{FinishReason, StopCause};
use crate::sequence::SchedulingKey;
use crate::step::{StepOutput, StepPlan, split_off};

impl EngineCore {
    pub(super) fn complete(&mut self, StepDone { mut plan, mut output, result }: StepDone, now: Instant) {
        let InFlightStep { step, mut owners } =
            self.in_flight.pop_front().expect("a step completed that is not in flight; this is a bug");
        assert_eq!((plan.step, output.step), (step, step), "steps completed out of order; this is a bug");
        self.stats.set_step_progress((!self.in_flight.is_empty()).then_some(now));
        self.scheduler.counters.steps += 1;
        let num_tokens = plan.rows.iter().map(|row| row.num_tokens).sum::<u32>();
        self.stats.tokens_per_step.observe(num_tokens.into(), 1);
        let check = |()| output.check(&plan, self.limits.vocabulary_size).map_err(StepError::Failed);
        match result.and_then(check) {
            Ok(()) => {
                self.deliver(&plan, &mut output, &owners, now);
                self.scheduler.step_done(num_tokens.into(), now);
            }
            // Without its changes the adapters on the device are unknown, and no row may run with another one's.
            Err(StepError::Failed(text)) if output.adapters_changed || plan.adapter_changes.is_empty() => {
                self.fail(&plan, output.copies_done, &owners, &text, now);
            }
            Err(StepError::Failed(text) | StepError::DeviceLost(text)) => {
                log::error!("the device was lost: {text}");
                self.stop(StopCause::DeviceLost(text.into()), now);
            }
        }
        plan.clear();
        output.clear();
        owners.clear();
        self.spare.push(StepBuffers { plan, output, owners });
        self.flush_finishes();
    }

    fn deliver(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        owners: &[Option<SchedulingKey>],
        now: Instant,
    ) {
        let StepOutput { rows, sampled, positions, forced, .. } = output;
        let (mut sampled, mut positions) = (&mut sampled[..], &mut positions[..]);
        for ((row, output), owner) in plan.rows.iter().zip(rows).zip(owners) {
            let tokens = split_off(&mut sampled, output.num_tokens);
            let positions = split_off(&mut positions, output.num_positions);
            let Some(key) = *owner else { continue };
            if let Some(text) = output.failure.take() {
                self.finish(row.slot, key, FinishReason::Failed(text), now);
                continue;
            }
            let Some(sequence) = self.scheduler.find(row.slot, key) else { continue };
            let has_events = !(tokens.is_empty() && positions.is_empty());
            let (mut end, mut num_appended) = (sequence.deliver_positions(row, positions), 0);
            let last_token = sequence.last_token();
            for token in tokens {
                if end.is_none() {
                    end = sequence.append(token.take(), now);
                    num_appended += 1;
                }
            }
            if has_events {
                self.ringer.touch(sequence.port, sequence.outbox.list());
            }
            match last_token {
                _ if num_appended == 0 => {}
                None => self.stats.time_to_first_token.observe(sequence.age(now).as_secs_f64(), 1),
                Some(last) => {
                    let latency = now.saturating_duration_since(last).as_secs_f64();
                    self.stats.inter_token_latency.observe(latency / num_appended as f64, num_appended);
                }
            }
            if num_appended > 0 {
                sequence.update_drafts(&forced[output.forced.start as usize..output.forced.end as usize]);
            }
            let counters = &mut self.scheduler.counters;
            counters.generation_tokens += num_appended;
            if row.num_drafts > 0 && !output.is_deferred {
                counters.drafted_tokens += u64::from(row.num_drafts);
                // The last token is not a draft, unless the request ended before it.
                counters.accepted_tokens += num_appended.min(u64::from(output.num_tokens) - 1);
            }
            let computed = self.scheduler.row_computed(row, output.is_deferred, key, now);
            self.scheduler.counters.prompt_tokens += computed.prompt as u64;
            self.scheduler.counters.recomputed_tokens += computed.again as u64;
            if row.sample.is_some_and(|sample| sample.index == 0) {
                self.scheduler.release_followers(key);
            }
            if output.is_deferred {
                self.ignore_rows_in_flight(|owner| owner == key);
            }
            if let Some(reason) = end {
                self.finish(row.slot, key, reason, now);
            }
        }
    }

    fn fail(
        &mut self,
        plan: &StepPlan,
        copies_done: bool,
        owners: &[Option<SchedulingKey>],
        text: &str,
        now: Instant,
    ) {
        if !copies_done && !plan.copies.is_empty() {
            self.invalidate_copies(plan.step, now);
        }
        for (row, owner) in plan.rows.iter().zip(owners) {
            if let Some(key) = *owner {
                self.finish(row.slot, key, FinishReason::Failed(text.to_owned()), now);
            }
        }
    }

    fn invalidate_copies(&mut self, step: u64, now: Instant) {
        let mut invalidated = Vec::new();
        self.scheduler.invalidate_copies(step, &mut invalidated, now);
        self.ignore_rows_in_flight(|owner| invalidated.contains(&owner));
    }

    fn ignore_rows_in_flight(&mut self, is_ignored: impl Fn(SchedulingKey) -> bool) {
        for owner in self.in_flight.iter_mut().flat_map(|step| &mut step.owners) {
            *owner = owner.filter(|key| !is_ignored(*key));
        }
    }
}
