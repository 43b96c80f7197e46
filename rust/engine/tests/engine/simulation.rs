//! Random schedules: arrivals, slow and dead consumers, cancels, stops, failures and shutdowns in any order, every book
//! checked after every operation, every answer compared with the oracle's.

use std::sync::Arc;

use penstock_engine::message::Message;
use penstock_engine::{DEPTH, Event, FinishReason, Limits, OnExhaustion, Refusal, Request, Token};

use crate::harness::{Client, Harness};
use crate::oracle::{self, VOCABULARY, answer};
use crate::random::Random;

const NUM_SCHEDULES: u64 = 4_000;
const FAILURE: &str = "simulated failure";

/// How a consumer treats its queue.
#[derive(Clone, Copy, PartialEq)]
enum Habit {
    /// Reads everything at every opportunity.
    Reads,
    /// Reads one event now and then.
    Dawdles,
    /// Never reads until the end of the schedule.
    Sleeps,
}

struct Observed {
    client: Client,
    habit: Habit,
    tokens: Vec<Token>,
    is_admitted: bool,
    is_cancelled: bool,
    end: Option<End>,
    /// Completed steps when the last token came.
    last_progress: u64,
}

#[derive(Debug)]
enum End {
    Refused(Refusal),
    Finished(FinishReason),
}

struct World {
    random: Random,
    harness: Harness,
    observed: Vec<Observed>,
    num_started: u64,
    num_failed_steps: u64,
    is_shut_down: bool,
    seen: Seen,
}

/// What all schedules together have met: a simulation that never pauses anybody proves nothing about pauses.
#[derive(Default)]
struct Seen {
    answered: u64,
    stopped: u64,
    cancelled: u64,
    failed: u64,
    overloaded: u64,
    paused: u64,
    waited: u64,
    overlapped: u64,
    shut_down: u64,
}

#[test]
fn any_schedule_gives_every_request_its_own_answer_and_leaks_nothing() {
    let mut seen = Seen::default();
    for seed in 0..NUM_SCHEDULES {
        let _named = Named(seed);
        let mut world = World::new(seed, std::mem::take(&mut seen));
        for _ in 0..world.random.between(20, 200) {
            world.act();
        }
        world.settle();
        world.check_answers();
        seen = world.seen;
    }
    let Seen { answered, stopped, cancelled, failed, overloaded, paused, waited, overlapped, shut_down } =
        seen;
    for met in [answered, stopped, cancelled, failed, overloaded, paused, waited, overlapped, shut_down] {
        assert!(met > NUM_SCHEDULES / 20, "something hardly ever happened");
    }
}

/// Says which schedule failed.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the schedule of seed {} failed", self.0);
        }
    }
}

fn random_limits(random: &mut Random) -> Limits {
    let max_num_seqs = random.between(1, 6);
    let max_model_len = random.between(4, 48);
    let block_size = random.between(1, 5);
    let blocks_of_one = max_model_len.div_ceil(block_size);
    Limits {
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + random.below(20),
        max_waiting: random.below(6),
        block_size,
        num_blocks: random.between(blocks_of_one.div_ceil(2), 2 * blocks_of_one + 8),
        vocabulary_size: VOCABULARY as usize,
        queue_capacity: random.between(1, 12),
        prefix_cache_ttl: None,
        max_shared_len: usize::MAX,
        on_exhaustion: OnExhaustion::Recompute,
        host_blocks: 0,
    }
}

impl World {
    fn new(seed: u64, seen: Seen) -> Self {
        let mut random = Random(seed);
        let harness = Harness::new(random_limits(&mut random));
        Self {
            random,
            harness,
            observed: vec![],
            num_started: 0,
            num_failed_steps: 0,
            is_shut_down: false,
            seen,
        }
    }

    fn random_request(&mut self) -> Request {
        let random = &mut self.random;
        let num_prompt = random.between(1, self.harness.limits.max_model_len - 1);
        let max_tokens = random.between(1, 20);
        let mut request = oracle::request(num_prompt, max_tokens, random.next());
        request.stop_token_ids =
            (0..random.below(3)).map(|_| random.below(VOCABULARY as usize) as u32).collect();
        if random.chance(30) {
            request.min_tokens = random.below(max_tokens + 1);
        }
        request
    }

    /// One random operation.
    fn act(&mut self) {
        self.harness.pass(1);
        match self.random.below(100) {
            0..20 => self.arrive(),
            20..45 => self.plan(),
            45..75 => self.complete(),
            75..78 => self.harness.attend(),
            78..84 => self.cancel(),
            84..99 => self.dawdle(),
            _ if self.random.chance(20) => self.shut_down(),
            _ => {}
        }
        self.read_all();
        self.check_stats();
    }

    fn arrive(&mut self) {
        let request = self.random_request();
        if self.harness.limits.check(&request).is_err() {
            return; // cannot ever fit this cache
        }
        let (start, client) = self.harness.post(request);
        let is_cancelled = self.random.chance(3);
        if is_cancelled {
            client.cancel();
        }
        let habit = [Habit::Reads, Habit::Reads, Habit::Dawdles, Habit::Sleeps][self.random.below(4)];
        let (tokens, last_progress) = (vec![], 0);
        self.harness.handle(Message::Start(start));
        self.num_started += 1;
        self.observed.push(Observed {
            client,
            habit,
            tokens,
            is_admitted: false,
            is_cancelled,
            end: None,
            last_progress,
        });
    }

    fn plan(&mut self) {
        self.harness.plan();
        self.seen.overlapped += u64::from(self.harness.device.num_plans() == DEPTH);
        self.check_cancelled();
    }

    fn complete(&mut self) {
        if self.harness.device.num_plans() == 0 {
            return;
        }
        if self.random.chance(3) {
            self.num_failed_steps += 1;
            self.harness.fail(FAILURE);
        } else {
            self.harness.complete();
        }
    }

    fn cancel(&mut self) {
        if !self.observed.is_empty() {
            let index = self.random.below(self.observed.len());
            self.observed[index].is_cancelled = true;
            self.observed[index].client.cancel();
        }
    }

    fn dawdle(&mut self) {
        if !self.observed.is_empty() {
            let index = self.random.below(self.observed.len());
            if self.observed[index].habit == Habit::Dawdles {
                self.read(index, 1);
            }
        }
    }

    fn shut_down(&mut self) {
        self.harness.handle(Message::Shutdown);
        self.is_shut_down = true;
        self.seen.shut_down += 1;
    }

    /// Nothing arrives any more, everybody reads: all must end, in a bounded number of steps.
    fn settle(&mut self) {
        for observed in &mut self.observed {
            observed.habit = Habit::Reads;
            // A paused one resumes behind the plans in flight.
            observed.last_progress = self.harness.stats().steps + DEPTH as u64;
        }
        let open = self.observed.iter().filter(|observed| observed.end.is_none());
        let num_tokens: usize = open
            .map(|observed| observed.client.request.prompt.len() + observed.client.request.max_tokens)
            .sum();
        let mut num_steps = 0;
        loop {
            self.read_all();
            self.check_stats();
            if !self.harness.step() {
                break;
            }
            num_steps += 1;
            assert!(num_steps <= 2 * num_tokens + 2 * DEPTH, "it does not come to an end");
        }
        self.read_all();
        assert!(self.harness.core.is_idle());
        let stats = self.harness.stats();
        assert_eq!((stats.running, stats.waiting, stats.paused), (0, 0, 0));
        assert_eq!((stats.blocks_used, stats.blocks_reserved), (0, 0));
    }

    fn read_all(&mut self) {
        for index in 0..self.observed.len() {
            if self.observed[index].habit == Habit::Reads {
                self.read(index, usize::MAX);
            }
        }
    }

    /// Reads and checks the grammar: `Admitted Token* Finished`, or `Refused` alone.
    fn read(&mut self, index: usize, limit: usize) {
        let steps = self.harness.stats().steps;
        let observed = &mut self.observed[index];
        for _ in 0..limit {
            let Some(event) = observed.client.pop() else { break };
            assert!(observed.end.is_none(), "something followed the end");
            match event {
                Event::Admitted => {
                    assert!(!observed.is_admitted, "admitted twice");
                    observed.is_admitted = true;
                }
                Event::Refused(refusal) => {
                    assert!(!observed.is_admitted, "refused after it was admitted");
                    observed.end = Some(End::Refused(refusal));
                }
                Event::Token(token) => {
                    assert!(observed.is_admitted);
                    // A stream whose consumer reads everything is in every plan, so it advances with every second
                    // completed step at least.
                    let is_late = steps > observed.last_progress + DEPTH as u64;
                    assert!(
                        observed.habit != Habit::Reads || observed.tokens.is_empty() || !is_late,
                        "starved"
                    );
                    observed.last_progress = observed.last_progress.max(steps);
                    observed.tokens.push(token);
                }
                Event::Finished(finish) => {
                    assert!(observed.is_admitted);
                    assert!(finish.queued <= finish.total);
                    assert_eq!(finish.first_token.is_some(), !observed.tokens.is_empty());
                    observed.end = Some(End::Finished(finish.reason));
                }
            }
        }
    }

    /// A cancel has been attended to by now: its queue holds the end.
    fn check_cancelled(&mut self) {
        for index in 0..self.observed.len() {
            if self.observed[index].is_cancelled {
                self.read(index, usize::MAX);
                assert!(self.observed[index].end.is_some(), "a cancelled request goes on");
            }
        }
    }

    fn check_stats(&mut self) {
        let stats = self.harness.stats();
        assert_eq!(stats.requests_admitted - stats.requests_finished, (stats.running + stats.waiting) as u64);
        self.seen.paused += u64::from(stats.paused > 0);
        self.seen.waited += u64::from(stats.waiting > 0);
    }

    fn check_answers(&mut self) {
        let mut num_admitted = 0;
        for Observed { client, tokens, is_cancelled, is_admitted, end, .. } in &self.observed {
            let (expected, reason) = answer(&client.request, &self.harness.limits);
            num_admitted += u64::from(*is_admitted);
            assert!(expected.starts_with(tokens), "tokens are not the oracle's");
            match end.as_ref().expect("a request never ended") {
                End::Refused(Refusal::Overloaded { waiting, limit }) => {
                    assert_eq!(
                        (*waiting, *limit),
                        (self.harness.limits.max_waiting, self.harness.limits.max_waiting)
                    );
                    self.seen.overloaded += 1;
                }
                End::Refused(Refusal::Stopped) => assert!(self.is_shut_down),
                End::Finished(FinishReason::Cancelled) => {
                    assert!(*is_cancelled || self.is_shut_down);
                    self.seen.cancelled += 1;
                }
                End::Finished(FinishReason::Failed(text)) => {
                    assert!(text == FAILURE && self.num_failed_steps > 0);
                    self.seen.failed += 1;
                }
                End::Finished(finished) => {
                    assert_eq!((finished, tokens.len()), (&reason, expected.len()));
                    self.seen.answered += 1;
                    self.seen.stopped += u64::from(matches!(finished, FinishReason::Stop(_)));
                }
            }
        }
        let stats = self.harness.stats();
        assert_eq!((stats.requests_admitted, stats.requests_finished), (num_admitted, num_admitted));
        let delivered: usize = self.observed.iter().map(|observed| observed.tokens.len()).sum();
        assert_eq!(stats.generation_tokens, delivered as u64);
        // The executor has let go of every request.
        assert!(self.observed.iter().all(|observed| Arc::strong_count(&observed.client.request) == 1));
    }
}
