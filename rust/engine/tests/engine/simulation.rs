//! Random schedules: arrivals, slow and dead consumers, cancels, stops, flushes, failures and shutdowns in any order, on
//! an engine with too little memory, every book checked after every operation, every answer compared with the oracle's.

use std::sync::Arc;
use std::time::Duration;

use penstock_engine::testing::BlockHasher;
use penstock_engine::testing::Message;
use penstock_engine::{
    CachedTokens, DEPTH, Event, FinishReason, Limits, PreemptionMode, PromptPosition, Rejection, Request,
    StopCause, Token,
};
use penstock_types::OutputScope;

use crate::device::ROW_FAILURE;
use crate::harness::{Client, Harness, read};
use crate::oracle::{self, Rails, VOCABULARY, answer};
use crate::random::Random;

const NUM_SCHEDULES: u64 = 4_000;
const FAILURE: &str = "simulated failure";
const LOSS: &str = "simulated loss of the device";

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
    positions: Vec<PromptPosition>,
    tokens: Vec<Token>,
    is_admitted: bool,
    is_cancelled: bool,
    end: Option<End>,
    cached: CachedTokens,
    /// Completed steps when the last token came.
    last_progress: u64,
}

#[derive(Debug)]
enum End {
    Rejected(Rejection),
    Finished(FinishReason),
}

struct World {
    random: Random,
    harness: Harness,
    observed: Vec<Observed>,
    num_started: u64,
    num_failed_steps: u64,
    /// Copies have failed: who relied on one started over.
    has_restarted: bool,
    /// Why it takes no more requests.
    stopped: Option<StopCause>,
    /// Where prompts begin.
    openings: Vec<Vec<u32>>,
    seen: Seen,
}

/// What all schedules together have met: a simulation that never pauses anybody proves nothing about pauses.
#[derive(Debug, Default)]
struct Seen {
    answered: u64,
    stopped: u64,
    cancelled: u64,
    failed: u64,
    failed_alone: u64,
    told: u64,
    only_told: u64,
    stopped_by_sequence: u64,
    chosen: u64,
    guessed: u64,
    forced: u64,
    refused: u64,
    preempted_drafting: u64,
    overloaded: u64,
    paused: u64,
    waited: u64,
    overlapped: u64,
    shut_down: u64,
    lost: u64,
    preempted: u64,
    swapped: u64,
    interrupted: u64,
    recomputed: u64,
    hit: u64,
    host_hit: u64,
    missed: u64,
    expired: u64,
    flushed: u64,
    failed_copies: u64,
    failed_after_copies: u64,
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
        world.let_readers_end();
        world.settle();
        world.check_answers();
        world.let_prefixes_expire();
        seen = world.seen;
    }
    let Seen {
        answered,
        stopped,
        cancelled,
        failed,
        overloaded,
        paused,
        waited,
        overlapped,
        shut_down,
        lost,
        ..
    } = seen;
    for met in [answered, stopped, cancelled, failed, overloaded, paused, waited, overlapped, shut_down, lost]
    {
        assert!(met > NUM_SCHEDULES / 20, "something hardly ever happened: {seen:?}");
    }
    let Seen { preempted, swapped, interrupted, recomputed, hit, host_hit, missed, expired, flushed, .. } =
        seen;
    for met in [preempted, swapped, interrupted, recomputed, hit, host_hit, missed, expired, flushed] {
        assert!(met > NUM_SCHEDULES / 20, "something hardly ever happened: {seen:?}");
    }
    let Seen { failed_alone, told, only_told, stopped_by_sequence, chosen, .. } = seen;
    for met in [failed_alone, told, only_told, stopped_by_sequence, chosen] {
        assert!(met > NUM_SCHEDULES / 20, "something hardly ever happened: {seen:?}");
    }
    for met in [seen.guessed, seen.forced, seen.refused, seen.preempted_drafting] {
        assert!(met > NUM_SCHEDULES / 20, "drafts hardly ever mattered: {seen:?}");
    }
    for met in [seen.failed_copies, seen.failed_after_copies] {
        assert!(met > NUM_SCHEDULES / 80, "copies hardly ever failed: {seen:?}");
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

fn lost() -> StopCause {
    StopCause::DeviceLost(LOSS.into())
}

fn random_limits(random: &mut Random) -> Limits {
    let max_num_seqs = random.between(1, 6);
    let max_model_len = random.between(4, 48);
    let block_size = random.between(1, 5);
    let blocks_of_one = max_model_len.div_ceil(block_size);
    let prefix_cache_ttl = random.chance(85).then(|| Duration::from_millis(random.between(5, 300) as u64));
    let preemption_mode =
        [PreemptionMode::Recompute, PreemptionMode::Swap, PreemptionMode::Interrupt][random.below(3)];
    let host_blocks = match (preemption_mode, prefix_cache_ttl) {
        (PreemptionMode::Swap, _) => random.between(1, 16),
        (_, Some(_)) if random.chance(60) => random.between(1, 16),
        _ => 0,
    };
    let limits = Limits {
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + random.below(20),
        max_waiting: random.below(6),
        block_size,
        num_blocks: random.between(blocks_of_one.div_ceil(2), blocks_of_one + 6),
        vocabulary_size: VOCABULARY as usize,
        queue_capacity: random.between(1, 12),
        prefix_cache_ttl,
        max_shared_len: if random.chance(80) { usize::MAX } else { random.below(max_model_len) },
        preemption_mode,
        host_blocks,
        host_prefixes: random.chance(95),
        num_speculative_tokens: if random.chance(50) { random.between(1, 8) } else { 0 },
    };
    limits.validate().unwrap();
    limits
}

/// Usually the engine's own; or one that tells few blocks apart, or none.
fn random_hasher(random: &mut Random) -> BlockHasher {
    let key = u128::from(random.next());
    match random.below(4) {
        0 => BlockHasher::with_function(key, |_, _, _| 0),
        1 => BlockHasher::with_function(key, |_, parent, tokens| {
            tokens.iter().fold(parent, |sum, token| sum + u128::from(*token)) % 4
        }),
        _ => BlockHasher::new(key),
    }
}

impl World {
    fn new(seed: u64, seen: Seen) -> Self {
        let mut random = Random(seed);
        let limits = random_limits(&mut random);
        let mut harness = Harness::with_hasher(limits, random_hasher(&mut random));
        harness.device.failing_rows = random.chance(20).then_some(40);
        let openings = (0..3).map(|opening| oracle::request(64, 1, opening).prompt.to_vec()).collect();
        Self {
            random,
            harness,
            observed: vec![],
            num_started: 0,
            num_failed_steps: 0,
            has_restarted: false,
            stopped: None,
            openings,
            seen,
        }
    }

    fn random_request(&mut self) -> Request {
        let prompt = self.random_prompt();
        let random = &mut self.random;
        let is_told = random.chance(15);
        let max_tokens = random.between(usize::from(!is_told), 20);
        let mut request = oracle::request(0, max_tokens, random.below(4) as u64);
        request.prompt = prompt.into();
        request.stop_token_ids =
            (0..random.below(3)).map(|_| random.below(VOCABULARY as usize) as u32).collect();
        if random.chance(20) {
            let sequence = |random: &mut Random| {
                (0..random.between(1, 2)).map(|_| random.below(VOCABULARY as usize) as u32).collect()
            };
            request.stop_token_sequences = (0..random.between(1, 8)).map(|_| sequence(random)).collect();
        }
        if random.chance(15) {
            request.grammar = Some(Arc::new(Rails));
        }
        if is_told {
            request.outputs.logits = Some([OutputScope::Prompt, OutputScope::All][random.below(2)]);
        }
        if random.chance(30) {
            request.min_tokens = random.below(max_tokens + 1);
        }
        request.priority = [0, 0, 0, 1, -1][random.below(5)];
        request.prefix_cache = random.chance(90);
        request.cache_salt = [None, None, None, Some("mine"), Some("yours")][random.below(5)].map(Arc::from);
        request
    }

    /// Begins as others do, or goes on where an earlier answer ended.
    fn random_prompt(&mut self) -> Vec<u32> {
        let random = &mut self.random;
        let num_prompt = random.between(1, self.harness.limits.max_model_len - 1);
        let mut prompt = if random.chance(30) && !self.observed.is_empty() {
            let Observed { client, tokens, .. } = &self.observed[random.below(self.observed.len())];
            client.request.prompt.iter().copied().chain(tokens.iter().map(|token| token.id)).collect()
        } else {
            self.openings[random.below(3)].clone()
        };
        prompt.truncate(num_prompt.saturating_sub(random.below(6)));
        prompt.resize_with(num_prompt, || random.below(VOCABULARY as usize) as u32);
        prompt
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
            84..97 => self.dawdle(),
            97 => self.flush(),
            98 => self.harness.pass(self.random.below(100) as u64),
            _ if self.random.chance(20) => self.shut_down(),
            _ if self.random.chance(30) => self.lose_device(),
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
        let num_choices = if self.random.chance(15) { self.random.between(2, 4) } else { 1 };
        let (mut starts, mut arrived) = (vec![], vec![]);
        for _ in 0..num_choices {
            let mut choice = request.clone();
            choice.sampling.seed += self.random.below(4) as u64;
            let (start, client) = self.harness.post(choice);
            let is_cancelled = self.random.chance(3);
            if is_cancelled {
                client.cancel();
            }
            let habit = [Habit::Reads, Habit::Reads, Habit::Dawdles, Habit::Sleeps][self.random.below(4)];
            starts.push(start);
            arrived.push(Observed {
                client,
                habit,
                positions: vec![],
                tokens: vec![],
                is_admitted: false,
                is_cancelled,
                end: None,
                cached: CachedTokens::default(),
                last_progress: 0,
            });
        }
        self.harness.handle(Message::Start(starts));
        self.num_started += num_choices as u64;
        self.seen.chosen +=
            u64::from(num_choices > 1 && self.harness.stats().waiting >= num_choices as u64 - 1);
        self.observed.append(&mut arrived);
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
            if self.random.chance(50) {
                let has_copies = self.harness.fail(FAILURE) > 0;
                self.has_restarted |= has_copies;
                self.seen.failed_copies += u64::from(has_copies);
            } else {
                self.seen.failed_after_copies += u64::from(self.harness.fail_after_copies(FAILURE) > 0);
            }
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

    fn flush(&mut self) {
        self.seen.flushed += u64::from(self.harness.stats().blocks_cached > 0);
        self.harness.handle(Message::ResetPrefixCache);
        assert_eq!(self.harness.stats().blocks_cached, 0);
    }

    fn shut_down(&mut self) {
        self.harness.handle(Message::Shutdown);
        self.stopped.get_or_insert(StopCause::Closed);
        self.seen.shut_down += 1;
    }

    fn lose_device(&mut self) {
        if self.harness.device.num_plans() > 0 {
            self.harness.lose_device(LOSS);
            self.stopped.get_or_insert_with(lost);
            self.seen.lost += 1;
            assert!(self.harness.core.is_stopped());
        }
    }

    /// Nothing arrives any more: all who read must end, whether or not the others ever do.
    fn let_readers_end(&mut self) {
        self.run_to_the_end();
        let readers = self.observed.iter().filter(|observed| observed.habit == Habit::Reads);
        assert!(readers.into_iter().all(|reader| reader.end.is_some()), "starved by those who sleep");
    }

    /// Everybody reads: all must end.
    fn settle(&mut self) {
        for observed in &mut self.observed {
            observed.habit = Habit::Reads;
            // A paused one resumes behind the plans in flight.
            observed.last_progress = self.harness.stats().steps + DEPTH as u64;
        }
        self.run_to_the_end();
        assert!(self.harness.core.is_idle());
        let stats = self.harness.stats();
        assert_eq!((stats.running, stats.waiting, stats.paused), (0, 0, 0));
        assert_eq!((stats.blocks_used, stats.blocks_reserved), (0, 0));
    }

    /// In a bounded number of steps: in each, the first in the order computes a token at least.
    fn run_to_the_end(&mut self) {
        let open = self.observed.iter().filter(|observed| observed.end.is_none());
        let num_steps: usize = open
            .map(|observed| observed.client.request.prompt.len() + observed.client.request.max_tokens + DEPTH)
            .sum();
        for _ in 0..=2 * (num_steps + DEPTH) {
            self.read_all();
            self.check_stats();
            if !self.harness.step() {
                return self.read_all();
            }
        }
        panic!("it does not come to an end");
    }

    /// What was kept goes when its time is over.
    fn let_prefixes_expire(&mut self) {
        let stats = self.harness.stats();
        self.seen.expired += u64::from(stats.blocks_cached > 0);
        self.harness.pass(300);
        self.harness.plan();
        let stats = self.harness.stats();
        if self.stopped.is_none() {
            assert_eq!((stats.blocks_cached, stats.host_blocks_used), (0, 0));
        }
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
        let stats = self.harness.stats();
        let has_lost_places = self.has_restarted || stats.preemptions > 0;
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
                Event::Rejected(refusal) => {
                    assert!(!observed.is_admitted, "refused after it was admitted");
                    observed.end = Some(End::Rejected(refusal));
                }
                Event::Token(token) => {
                    assert!(observed.is_admitted);
                    // A stream whose consumer reads everything is in every plan, so it advances with every second
                    // completed step at least, as long as nobody has to be preempted or to start over.
                    let last = observed.last_progress;
                    let is_late = stats.steps > last + DEPTH as u64 && !has_lost_places;
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
        assert!(stats.blocks_used + stats.blocks_cached <= stats.blocks_total);
        assert!(stats.host_blocks_used <= stats.host_blocks_total);
        self.seen.paused += u64::from(stats.paused > 0);
        self.seen.waited += u64::from(stats.waiting > 0);
    }

    fn check_answers(&mut self) {
        let mut num_admitted = 0;
        let (mut num_cached, mut num_cached_on_host) = (0, 0);
        // Prompt tokens that were computed or found for certain, and all that can have been.
        let mut num_prompt = (0, 0);
        for observed in &self.observed {
            let Observed { client, positions, tokens, is_cancelled, is_admitted, end, cached, .. } = observed;
            let (expected, reason) = answer(&client.request, &self.harness.limits);
            num_admitted += u64::from(*is_admitted);
            assert!(expected.starts_with(tokens), "tokens are not the oracle's");
            let told = oracle::positions(&client.request, &self.harness.limits);
            assert!(told.starts_with(positions), "positions are not the oracle's");
            assert!(tokens.is_empty() || positions.len() == told.len(), "a token came first");
            let found = cached.device + cached.host;
            assert!(found < client.request.prompt.len() && found % self.harness.limits.block_size == 0);
            assert!(
                found
                    <= self.harness.limits.num_shareable_blocks(&client.request)
                        * self.harness.limits.block_size
            );
            assert!(found == 0 || told.is_empty(), "a position to be told of was not computed");
            num_cached += found as u64;
            num_cached_on_host += cached.host as u64;
            num_prompt.0 += if tokens.is_empty() { 0 } else { client.request.prompt.len() as u64 };
            num_prompt.1 += if *is_admitted { client.request.prompt.len() as u64 } else { 0 };
            match end.as_ref().expect("a request never ended") {
                End::Rejected(Rejection::Overloaded { waiting, limit }) => {
                    assert!(waiting >= limit && *limit == self.harness.limits.max_waiting);
                    self.seen.overloaded += 1;
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
                End::Finished(FinishReason::Failed(text)) => {
                    let is_row = text == ROW_FAILURE && self.harness.device.failing_rows.is_some();
                    assert!(is_row || text == FAILURE && self.num_failed_steps > 0);
                    self.seen.failed += u64::from(!is_row);
                    self.seen.failed_alone += u64::from(is_row);
                }
                End::Finished(finished) => {
                    assert_eq!((finished, tokens.len()), (&reason, expected.len()));
                    assert_eq!(positions.len(), told.len());
                    self.seen.told += u64::from(!told.is_empty());
                    self.seen.only_told += u64::from(expected.is_empty());
                    self.seen.stopped_by_sequence +=
                        u64::from(matches!(finished, FinishReason::StopSequence(_)));
                    self.seen.answered += 1;
                    self.seen.stopped += u64::from(matches!(finished, FinishReason::Stop(_)));
                }
            }
        }
        let stats = self.harness.stats();
        assert_eq!((stats.requests_admitted, stats.requests_finished), (num_admitted, num_admitted));
        assert_eq!((stats.prefix_hit_tokens, stats.prefix_host_hit_tokens), (num_cached, num_cached_on_host));
        // Who is preempted or starts over may find in the cache what others have computed meanwhile.
        let has_lost_places = self.has_restarted || stats.preemptions > 0;
        let least = if has_lost_places { 0 } else { num_prompt.0 };
        assert!((least..=num_prompt.1).contains(&(stats.prompt_tokens + num_cached)));
        assert!(stats.prefix_query_tokens <= num_prompt.1 && stats.swaps <= stats.preemptions);
        assert!(stats.accepted_tokens <= stats.drafted_tokens.min(stats.generation_tokens));
        let accepts = stats.accepted_tokens > 0;
        let may_guess = self.harness.limits.num_speculative_tokens > 0;
        self.seen.guessed += u64::from(accepts && may_guess);
        self.seen.forced += u64::from(accepts && !may_guess);
        self.seen.refused += u64::from(self.harness.device.num_refused > 0);
        self.seen.preempted_drafting += u64::from(accepts && stats.preemptions > 0);
        self.seen.preempted += u64::from(stats.preemptions > 0);
        self.seen.swapped += u64::from(stats.swaps > 0);
        self.seen.recomputed += u64::from(stats.recomputed_tokens > 0);
        self.seen.hit += u64::from(num_cached > 0);
        self.seen.host_hit += u64::from(num_cached_on_host > 0);
        self.seen.missed += u64::from(num_cached < stats.prefix_query_tokens);
        let delivered: usize = self.observed.iter().map(|observed| observed.tokens.len()).sum();
        assert_eq!(stats.generation_tokens, delivered as u64);
        self.check_released();
    }

    /// With the next plan the device hears of the slots that were left last: nobody has a request any more but who made it.
    fn check_released(&mut self) {
        if self.stopped.is_none() {
            let mut last = self.harness.start(oracle::request(1, 1, 0));
            self.harness.run();
            while read(&mut last).1.is_none() {
                self.harness.run();
            }
        }
        let num_held = |observed: &&Observed| Arc::strong_count(&observed.client.request) > 1;
        let num_held = self.observed.iter().filter(num_held).count();
        // After a shutdown there is no next plan.
        let most = if self.stopped.is_some() { self.harness.limits.max_num_seqs } else { 0 };
        assert!(num_held <= most, "{num_held} requests are kept");
    }
}
