//! The checks of a simulation: the events of every consumer, the statistics, and the outputs at the end.

use std::collections::HashSet;
use std::sync::Weak;

use penstock_engine::{DEPTH, Event, FinishReason, Limits, PreemptionMode, Rejection, StopCause};

use super::{End, FAILURE, Habit, Observed, UNLOADED, World, lost};
use crate::device::ROW_FAILURE;
use crate::harness::read;
use crate::oracle::{self, expected_output};

impl World {
    pub fn read_all(&mut self) {
        for index in 0..self.observed.len() {
            if self.observed[index].habit.is_reading() {
                self.read(index, usize::MAX);
            }
        }
    }

    /// Reads and checks the order: `Admitted Prompt* Token* Finished`, or `Rejected` alone.
    pub fn read(&mut self, index: usize, limit: usize) {
        let stats = self.harness.stats();
        let may_wait = self.has_restarted || stats.preemptions > 0 || self.harness.device.num_deferred > 0;
        let observed = &mut self.observed[index];
        for _ in 0..limit {
            let Some(event) = observed.client.pop() else { break };
            assert!(observed.end.is_none(), "something followed the end");
            match event {
                Event::Prompt(positions) => {
                    assert!(observed.is_admitted && observed.tokens.is_empty());
                    observed.positions.extend(positions);
                }
                Event::Admitted => {
                    assert!(!observed.is_admitted, "admitted twice");
                    observed.is_admitted = true;
                }
                Event::Rejected(rejection) => {
                    assert!(!observed.is_admitted, "rejected after it was admitted");
                    observed.end = Some(End::Rejected(rejection));
                }
                Event::Token(token) => {
                    assert!(observed.is_admitted);
                    // A request that is read is in every plan, so it advances at least with every second completed
                    // step, as long as no sequence is preempted, deferred or starts over.
                    let last = observed.last_progress;
                    let is_late = stats.steps > last + DEPTH as u64 && !may_wait;
                    assert!(
                        observed.habit != Habit::Reads || observed.tokens.is_empty() || !is_late,
                        "starved"
                    );
                    observed.last_progress = last.max(stats.steps);
                    observed.tokens.push(token);
                }
                Event::Finished(finish) => {
                    assert!(observed.is_admitted);
                    assert!(finish.queued <= finish.total);
                    assert_eq!(finish.first_token.is_some(), !observed.tokens.is_empty());
                    observed.cached = finish.cached;
                    observed.end = Some(End::Finished(finish.reason));
                }
            }
        }
    }

    /// Cancelled requests have ended.
    pub fn check_cancelled(&mut self) {
        for index in 0..self.observed.len() {
            if self.observed[index].is_cancelled {
                self.read(index, usize::MAX);
                assert!(self.observed[index].end.is_some(), "a cancelled request goes on");
            }
        }
    }

    pub fn check_stats(&mut self) {
        let stats = self.harness.stats();
        assert_eq!(stats.requests_admitted - stats.requests_finished, stats.running + stats.waiting);
        assert!(stats.blocks_used + stats.blocks_cached <= stats.blocks_total);
        assert!(stats.host_blocks_used <= stats.host_blocks_total);
        assert!(stats.paused <= self.harness.limits.max_paused as u64);
        self.seen.paused += u64::from(stats.paused > 0);
        self.seen.waited += u64::from(stats.waiting > 0);
    }

    /// Held adapters are not removed.
    pub fn check_holds(&mut self) {
        for (id, removal) in &self.removals {
            if self.holds.contains(id) {
                assert!(!removal.is_done(), "{id} is held");
                self.seen.held += 1;
            }
        }
    }

    pub fn check_outputs(&mut self) {
        let mut num_admitted = 0;
        let (mut num_cached, mut num_cached_on_host) = (0, 0);
        let num_preemptions = self.harness.stats().preemptions;
        // Prompt tokens that were certainly computed or found, and the most that can have been.
        let mut num_prompt = (0, 0);
        for observed in &self.observed {
            let Observed { client, positions, tokens, is_cancelled, is_admitted, end, cached, .. } = observed;
            let (expected, reason) = expected_output(&client.request, &self.harness.limits);
            num_admitted += u64::from(*is_admitted);
            assert!(expected.starts_with(tokens), "tokens are not as expected");
            let expected_positions = oracle::positions(&client.request, &self.harness.limits);
            assert!(expected_positions.starts_with(positions), "positions are not as expected");
            assert!(tokens.is_empty() || positions.len() == expected_positions.len(), "a token came first");
            let found = cached.device + cached.host;
            assert!(found < client.request.prompt.len());
            // A preempted sequence that had computed a part of a block finds the rest of it.
            assert!(found.is_multiple_of(self.harness.limits.block_size) || num_preemptions > 0);
            assert!(
                found
                    <= self.harness.limits.num_shareable_blocks(&client.request)
                        * self.harness.limits.block_size
            );
            assert!(found == 0 || expected_positions.is_empty(), "a position with outputs was not computed");
            num_cached += found as u64;
            num_cached_on_host += cached.host as u64;
            num_prompt.0 += if tokens.is_empty() { 0 } else { client.request.prompt.len() as u64 };
            num_prompt.1 += if *is_admitted { client.request.prompt.len() as u64 } else { 0 };
            match end.as_ref().expect("a request never ended") {
                End::Rejected(Rejection::Overloaded { waiting, limit }) => {
                    let bound = self.harness.limits.max_waiting;
                    assert!(waiting >= limit && *waiting <= 2 * bound, "{waiting} wait");
                    assert!([bound, 2 * bound].contains(limit), "{limit}");
                    self.seen.overloaded += 1;
                }
                End::Rejected(Rejection::TooManyPreempted { waiting, limit }) => {
                    let limits = &self.harness.limits;
                    let bounds = [1, 2].map(|share| share * limits.max_waiting + limits.max_num_seqs);
                    assert!(waiting >= limit && bounds.contains(limit), "{waiting} of {limit}");
                    self.seen.overloaded += 1;
                }
                End::Rejected(Rejection::TooManyUnfinished { unfinished, choices, limit }) => {
                    let Limits { max_unfinished, max_paused, .. } = self.harness.limits;
                    assert!(unfinished + choices > *limit && *unfinished <= 2 * max_unfinished + max_paused);
                    assert!([max_unfinished, 2 * max_unfinished].contains(limit), "{limit}");
                    self.seen.too_many += 1;
                }
                End::Rejected(Rejection::TooLate { least, left }) => {
                    assert!(least > left && client.request.deadline.is_some());
                    self.seen.too_late += 1;
                }
                End::Rejected(Rejection::UnknownAdapter { .. }) => {
                    assert!(!observed.is_held, "the adapter was held");
                    let adapter = client.request.adapter.unwrap();
                    assert!(self.removals.iter().any(|(id, _)| *id == adapter), "{adapter} is registered");
                    self.seen.unknown_adapter += 1;
                }
                End::Rejected(Rejection::Stopped(cause)) => assert_eq!(Some(cause), self.stopped.as_ref()),
                End::Finished(FinishReason::EngineStopped(cause)) => {
                    assert_eq!((Some(cause), cause), (self.stopped.as_ref(), &lost()));
                }
                End::Finished(FinishReason::Cancelled) => {
                    assert!(*is_cancelled || self.stopped == Some(StopCause::Closed));
                    self.seen.cancelled += 1;
                }
                End::Finished(FinishReason::Interrupted) => {
                    assert_eq!(self.harness.limits.preemption_mode, PreemptionMode::Interrupt);
                    self.seen.interrupted += 1;
                }
                End::Finished(FinishReason::Unread) => {
                    assert!(!observed.was_read, "a request that is read ended as unread");
                    self.seen.unread += 1;
                }
                End::Finished(FinishReason::Failed(text)) => {
                    if text == UNLOADED {
                        let adapter = client.request.adapter.unwrap();
                        assert!(
                            self.removals.iter().any(|(id, _)| *id == adapter),
                            "{adapter} is registered"
                        );
                        self.seen.unloaded += 1;
                        continue;
                    }
                    let is_row = text == ROW_FAILURE && self.harness.device.failing_rows.is_some();
                    assert!(is_row || text == FAILURE && self.num_failed_steps > 0);
                    self.seen.failed += u64::from(!is_row);
                    self.seen.failed_rows += u64::from(is_row);
                }
                End::Finished(finished) => {
                    assert_eq!((finished, tokens.len()), (&reason, expected.len()));
                    assert_eq!(positions.len(), expected_positions.len());
                    self.seen.scored += u64::from(!expected_positions.is_empty());
                    self.seen.prompt_only += u64::from(expected.is_empty());
                    self.seen.stopped_by_sequence +=
                        u64::from(matches!(finished, FinishReason::StopSequence(_)));
                    self.seen.completed += 1;
                    self.seen.stopped += u64::from(matches!(finished, FinishReason::Stop(_)));
                }
            }
        }
        let stats = self.harness.stats();
        assert_eq!((stats.requests_admitted, stats.requests_finished), (num_admitted, num_admitted));
        let by_reason = stats.finished_stop
            + stats.finished_length
            + stats.finished_cancelled
            + stats.finished_interrupted
            + stats.finished_unread
            + stats.finished_failed;
        assert_eq!(by_reason, num_admitted);
        assert_eq!((stats.prefix_hit_tokens, stats.prefix_host_hit_tokens), (num_cached, num_cached_on_host));
        // A sequence that is preempted or starts over may find blocks that others have computed meanwhile.
        let has_preemptions = self.has_restarted || stats.preemptions > 0;
        let least = if has_preemptions { 0 } else { num_prompt.0 };
        assert!((least..=num_prompt.1).contains(&(stats.prompt_tokens + num_cached)));
        assert!(stats.prefix_query_tokens <= num_prompt.1 && stats.swaps <= stats.preemptions);
        assert!(stats.accepted_tokens <= stats.drafted_tokens.min(stats.generation_tokens));
        let accepts = stats.accepted_tokens > 0;
        let speculates = self.harness.limits.num_speculative_tokens > 0;
        self.seen.speculated += u64::from(accepts && speculates);
        self.seen.forced += u64::from(accepts && !speculates);
        self.seen.deferred_rows += self.harness.device.num_deferred;
        self.seen.rejected_drafts += u64::from(self.harness.device.num_rejected_drafts > 0);
        self.seen.preempted_drafting += u64::from(accepts && stats.preemptions > 0);
        self.seen.preempted += u64::from(stats.preemptions > 0);
        assert!(stats.adapter_loads >= self.harness.device.num_loads, "a load was not counted");
        assert!(stats.adapter_evictions <= stats.adapter_loads);
        self.seen.loaded_again += u64::from(self.harness.device.num_loads > self.num_adapters);
        let has_choices = self.observed.iter().any(|observed| observed.has_siblings && observed.is_admitted);
        self.seen.pressed_choices += u64::from(has_choices && stats.preemptions > 0);
        self.seen.swapped += u64::from(stats.swaps > 0);
        self.seen.recomputed += u64::from(stats.recomputed_tokens > 0);
        self.seen.hit += u64::from(num_cached > 0);
        self.seen.host_hit += u64::from(num_cached_on_host > 0);
        self.seen.missed += u64::from(num_cached < stats.prefix_query_tokens);
        let delivered: usize = self.observed.iter().map(|observed| observed.tokens.len()).sum();
        assert_eq!(stats.generation_tokens, delivered as u64);
        self.check_released();
    }

    /// The next plan reports the slots freed last: afterwards only the clients keep their requests.
    fn check_released(&mut self) {
        if self.stopped.is_none() {
            let mut last = self.harness.start(oracle::request(1, 1, 0));
            self.harness.run();
            while read(&mut last).1.is_none() {
                self.harness.run();
            }
        }
        let shared = self.observed.iter().map(|observed| &observed.client.shared);
        let kept = shared.filter(|shared| shared.strong_count() > 0).map(Weak::as_ptr);
        let num_kept = kept.collect::<HashSet<_>>().len();
        // After the engine has stopped there is no next plan.
        let most = if self.stopped.is_some() { self.harness.limits.max_num_seqs } else { 0 };
        assert!(num_kept <= most, "{num_kept} requests are kept");
    }
}
