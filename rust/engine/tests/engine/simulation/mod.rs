//! Random schedules: arrivals, slow and dropped consumers, cancels, stops, resets, failures, lost devices and shutdowns
//! in any order, on an engine with too few blocks. Its integrity is checked after every operation, and every output is
//! compared with the expected one.

mod checks;
mod inputs;

use std::sync::Arc;

use penstock_engine::testing::Message;
use penstock_engine::{
    AdapterError, AdapterId, CachedTokens, DEPTH, FinishReason, PromptPosition, Rejection, StopCause,
};
use penstock_types::Token;

use self::inputs::{random_hasher, random_limits};
use crate::device::Device;
use crate::harness::{Client, Harness, Removal};
use crate::mirror::{Mirror, Mirrored};
use crate::oracle;
use crate::random::Random;

const NUM_SCHEDULES: u64 = 4_000;
const FAILURE: &str = "simulated failure";
const UNLOADED: &str = "the adapter was unloaded";
const LOSS: &str = "simulated loss of the device";

/// The reading behaviour of a consumer.
#[derive(Clone, Copy, PartialEq)]
enum Habit {
    /// Reads everything after every operation.
    Reads,
    /// Reads one event at times.
    ReadsSlowly,
    /// Reads everything, or nothing, for a while each.
    ReadsAtTimes { is_reading: bool },
    /// Reads nothing until the end of the schedule.
    ReadsLate,
    /// Reads nothing, and is dropped at the end.
    NeverReads,
}

impl Habit {
    fn is_reading(self) -> bool {
        matches!(self, Self::Reads | Self::ReadsAtTimes { is_reading: true })
    }
}

struct Observed {
    client: Client,
    habit: Habit,
    /// Whether it was read from the start.
    was_read: bool,
    /// Whether it is one of several choices.
    has_siblings: bool,
    /// Whether its adapter was held when it was started.
    is_held: bool,
    positions: Vec<PromptPosition>,
    tokens: Vec<Token>,
    is_admitted: bool,
    is_cancelled: bool,
    end: Option<End>,
    cached: CachedTokens,
    /// The number of completed steps when the last token came.
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
    /// Copies have failed, and sequences that depended on them started over.
    has_restarted: bool,
    /// The reason why it takes no more requests.
    stopped: Option<StopCause>,
    /// Adapters that requests may have; the last one may be unknown.
    adapters: Vec<AdapterId>,
    /// The ends of removals that have begun.
    removals: Vec<(AdapterId, Removal)>,
    /// Adapters that are held; more than once if they are held more than once.
    holds: Vec<AdapterId>,
    /// Holds that a forced removal has ended and that are still to be released.
    ended_holds: Vec<AdapterId>,
    num_adapters: u64,
    /// The KV events that are read, and a generator for the times.
    mirror: Option<Mirror>,
    other: Random,
    /// The beginnings of prompts.
    openings: Vec<Vec<u32>>,
    seen: Seen,
}

/// The number of times that all schedules together met each case: a simulation without pauses would prove nothing about
/// pauses.
#[derive(Debug, Default)]
struct Seen {
    completed: u64,
    stopped: u64,
    cancelled: u64,
    failed: u64,
    failed_rows: u64,
    scored: u64,
    prompt_only: u64,
    stopped_by_sequence: u64,
    chosen: u64,
    speculated: u64,
    forced: u64,
    deferred_rows: u64,
    rejected_drafts: u64,
    preempted_drafting: u64,
    overloaded: u64,
    too_many: u64,
    too_late: u64,
    paused: u64,
    paused_waiting: u64,
    pressed_choices: u64,
    waited: u64,
    overlapped: u64,
    shut_down: u64,
    lost: u64,
    preempted: u64,
    swapped: u64,
    interrupted: u64,
    unread: u64,
    recomputed: u64,
    hit: u64,
    host_hit: u64,
    missed: u64,
    expired: u64,
    reset: u64,
    failed_copies: u64,
    failed_after_copies: u64,
    loaded_again: u64,
    lost_adapters: u64,
    kept_adapters: u64,
    replaced_adapters: u64,
    unknown_adapter: u64,
    too_many_bytes: u64,
    held: u64,
    started_held: u64,
    ended_holds: u64,
    unloaded: u64,
    removed_late: u64,
    /// Operations with a mirror.
    mirrored: u64,
    lost_events: u64,
    mirrored_host: u64,
    mirrored_salts: u64,
    mirrored_adapters: u64,
}

#[test]
fn random_schedules_give_expected_outputs_and_leak_nothing() {
    let mut seen = Seen::default();
    for seed in 0..NUM_SCHEDULES {
        let _named = Named(seed);
        let mut world = World::new(seed, std::mem::take(&mut seen));
        for _ in 0..world.random.between(20, 200) {
            world.act();
        }
        world.finish_readers();
        world.finish_all();
        world.check_outputs();
        world.expire_prefixes();
        world.compare_mirror();
        seen = world.end();
    }
    let Seen {
        completed,
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
    for met in
        [completed, stopped, cancelled, failed, overloaded, paused, waited, overlapped, shut_down, lost]
    {
        assert!(met > NUM_SCHEDULES / 20, "a case hardly ever happened: {seen:?}");
    }
    let Seen { preempted, swapped, interrupted, recomputed, hit, host_hit, missed, expired, reset, .. } =
        seen;
    for met in [preempted, swapped, interrupted, recomputed, hit, host_hit, missed, expired, reset] {
        assert!(met > NUM_SCHEDULES / 20, "a case hardly ever happened: {seen:?}");
    }
    let Seen { failed_rows, scored, prompt_only, stopped_by_sequence, chosen, .. } = seen;
    for met in [failed_rows, scored, prompt_only, stopped_by_sequence, chosen] {
        assert!(met > NUM_SCHEDULES / 20, "a case hardly ever happened: {seen:?}");
    }
    assert!(seen.deferred_rows > NUM_SCHEDULES, "rows were hardly ever deferred: {seen:?}");
    for met in [seen.speculated, seen.forced, seen.rejected_drafts, seen.preempted_drafting] {
        assert!(met > NUM_SCHEDULES / 20, "drafts hardly ever mattered: {seen:?}");
    }
    for met in [seen.too_many, seen.too_late, seen.unread, seen.paused_waiting, seen.pressed_choices] {
        assert!(met > NUM_SCHEDULES / 20, "a case hardly ever happened: {seen:?}");
    }
    for met in [seen.loaded_again, seen.unknown_adapter, seen.unloaded, seen.removed_late] {
        assert!(met > NUM_SCHEDULES / 80, "adapters hardly ever mattered: {seen:?}");
    }
    for met in [seen.too_many_bytes, seen.held, seen.started_held, seen.ended_holds] {
        assert!(met > NUM_SCHEDULES / 80, "holds hardly ever mattered: {seen:?}");
    }
    for met in [seen.lost_adapters, seen.kept_adapters] {
        assert!(met > 0, "no step failed that changes adapters: {seen:?}");
    }
    assert!(seen.replaced_adapters > 0, "no adapter was replaced: {seen:?}");
    assert!(seen.mirrored > 100_000, "KV events were hardly ever read: {seen:?}");
    for met in [seen.lost_events, seen.mirrored_host, seen.mirrored_salts, seen.mirrored_adapters] {
        assert!(met > NUM_SCHEDULES / 20, "the mirror hardly ever had a case: {seen:?}");
    }
    for met in [seen.failed_copies, seen.failed_after_copies] {
        assert!(met > NUM_SCHEDULES / 80, "copies hardly ever failed: {seen:?}");
    }
}

/// Prints the seed of a schedule that fails.
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

impl World {
    fn new(seed: u64, seen: Seen) -> Self {
        let mut random = Random(seed);
        let mut limits = random_limits(&mut random);
        let mut other = Random(!seed);
        let deferring_rows = other.chance(15).then(|| other.between(2, 8) as u64);
        if other.chance(10) {
            limits.max_prefill_chunk = other.between(1, 8);
        }
        if other.chance(50) {
            limits.kv_hash_key = u128::from(other.next());
        }
        let mut harness = Harness::with_hasher(limits, random_hasher(&mut random));
        // Some feeds are so short that readers often lose events.
        let capacity = if other.chance(20) { other.between(1, 20) } else { usize::MAX };
        let mirror = other.chance(80).then(|| Mirror::new(&mut harness, capacity));
        harness.device.failing_rows = random.chance(20).then_some(40);
        harness.device.deferring_rows = deferring_rows;
        let openings = (0..3).map(|opening| oracle::request(64, 1, opening).prompt.to_vec()).collect();
        Self {
            random,
            harness,
            observed: vec![],
            num_started: 0,
            num_failed_steps: 0,
            has_restarted: false,
            stopped: None,
            adapters: vec![],
            removals: vec![],
            holds: vec![],
            ended_holds: vec![],
            num_adapters: 0,
            mirror,
            other,
            openings,
            seen,
        }
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
            84..93 => self.read_slowly(),
            93..96 => self.change_holds(),
            96 => self.change_adapters(),
            97 => self.reset(),
            98 if self.random.chance(30) => self.harness.pass(1000), // the least time for a rate
            98 => self.harness.pass(self.random.below(100) as u64),
            _ if self.random.chance(20) => self.shut_down(),
            _ if self.random.chance(30) => self.lose_device(),
            _ => {}
        }
        self.read_all();
        self.check_stats();
        self.check_holds();
        self.compare_mirror();
    }

    /// Hands over the KV events, and at times compares what they tell with the prefix cache.
    fn compare_mirror(&mut self) {
        let Some(mirror) = &mut self.mirror else { return };
        self.harness.core.ring();
        self.seen.mirrored += 1;
        if self.other.chance(60) {
            let Mirrored { lost, host, salted, adapters } = mirror.compare(&mut self.harness);
            self.seen.lost_events += u64::from(lost);
            self.seen.mirrored_host += u64::from(host);
            self.seen.mirrored_salts += u64::from(salted);
            self.seen.mirrored_adapters += u64::from(adapters);
        }
    }

    fn arrive(&mut self) {
        let request = self.random_request();
        let is_group = request.max_tokens > 0 && self.random.chance(15);
        let num_choices = if is_group { self.random.between(2, 8) as u32 } else { 1 };
        if self.harness.limits.check_choices(&request, num_choices).is_err() {
            return; // it never fits this cache
        }
        let is_held = request.adapter.is_some_and(|id| self.holds.contains(&id));
        let is_removed = |id: AdapterId| self.removals.iter().any(|(removed, _)| *removed == id);
        self.seen.started_held += u64::from(is_held && request.adapter.is_some_and(is_removed));
        let (start, clients) = self.harness.post(request, num_choices);
        let mut arrived = vec![];
        for client in clients {
            let is_cancelled = self.random.chance(3);
            if is_cancelled {
                client.cancel();
            }
            let habit = match self.random.below(8) {
                0..4 => Habit::Reads,
                4 => Habit::ReadsSlowly,
                5 => Habit::ReadsAtTimes { is_reading: false },
                6 => Habit::ReadsLate,
                _ => Habit::NeverReads,
            };
            arrived.push(Observed {
                client,
                habit,
                was_read: habit == Habit::Reads,
                has_siblings: num_choices > 1,
                is_held,
                positions: vec![],
                tokens: vec![],
                is_admitted: false,
                is_cancelled,
                end: None,
                cached: CachedTokens::default(),
                last_progress: 0,
            });
        }
        self.harness.handle(Message::Start(start));
        self.num_started += u64::from(num_choices);
        self.seen.chosen +=
            u64::from(num_choices > 1 && self.harness.stats().waiting >= u64::from(num_choices) - 1);
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
                let changes_adapters = self.harness.device.changes_adapters();
                let makes_changes = self.random.chance(50);
                if changes_adapters && !makes_changes {
                    self.harness.fail(LOSS);
                    self.stopped.get_or_insert_with(lost);
                    self.seen.lost_adapters += 1;
                    return assert!(self.harness.core.is_stopped());
                }
                self.seen.kept_adapters += u64::from(changes_adapters);
                let num_copies = match makes_changes {
                    true => self.harness.fail_after_adapters(FAILURE),
                    false => self.harness.fail(FAILURE),
                };
                let has_copies = num_copies > 0;
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

    fn read_slowly(&mut self) {
        if !self.observed.is_empty() {
            let index = self.random.below(self.observed.len());
            match &mut self.observed[index].habit {
                Habit::ReadsSlowly => self.read(index, 1),
                Habit::ReadsAtTimes { is_reading } => *is_reading = !*is_reading,
                _ => {}
            }
        }
    }

    fn reset(&mut self) {
        self.seen.reset += u64::from(self.harness.stats().blocks_cached > 0);
        let salt = [None, Some("mine"), Some("yours"), Some("unknown")][self.random.below(4)].map(Arc::from);
        let is_complete = salt.is_none();
        self.harness.handle(Message::ResetPrefixCache(salt));
        assert!(!is_complete || self.harness.stats().blocks_cached == 0);
    }

    /// Registers adapters, or removes one.
    fn change_adapters(&mut self) {
        if self.harness.limits.max_adapters == 0 {
            return;
        }
        if self.adapters.is_empty() || self.random.chance(60) {
            for _ in 0..self.random.between(1, 3) {
                self.num_adapters += 1;
                let id = self.num_adapters;
                let former = self.adapters.first().filter(|_| self.random.chance(30)).copied();
                let loaded = match former {
                    Some(former) => self.harness.replace_adapter(former.0, id),
                    None => {
                        let bytes = self.random.between(1, 6).min(self.harness.limits.adapter_bytes as usize);
                        self.harness.load_adapter(id, bytes as u64).map(drop)
                    }
                };
                match loaded {
                    Ok(()) => {
                        self.adapters.push(AdapterId(id));
                        if let Some(former) = former {
                            self.seen.replaced_adapters += 1;
                            let removal = self.harness.unload_adapter(former.0, None);
                            self.removals.push((former, removal));
                            self.adapters.retain(|other| *other != former);
                        }
                    }
                    Err(AdapterError::TooMany { loaded, closing, limit }) => {
                        assert!(limit == 6 && (loaded == 6 || loaded + closing == 12), "{loaded}, {closing}");
                    }
                    Err(AdapterError::TooManyBytes { bytes, registered, limit }) => {
                        assert!(limit == self.harness.limits.max_registered_bytes);
                        assert!(bytes <= limit && registered <= limit && bytes + registered > limit);
                        self.seen.too_many_bytes += 1;
                    }
                    Err(AdapterError::Stopped(_)) => assert!(self.stopped.is_some()),
                }
            }
            return;
        }
        let id = self.adapters[self.random.below(self.adapters.len())];
        let reason = self.random.chance(40).then_some(UNLOADED);
        let removal = self.harness.unload_adapter(id.0, reason);
        assert!(reason.is_none() || removal.is_done(), "an adapter without requests is left");
        if reason.is_some() {
            let num_holds = self.holds.len();
            self.ended_holds.extend(self.holds.extract_if(.., |held| *held == id));
            self.seen.ended_holds += (num_holds - self.holds.len()) as u64;
        }
        self.seen.removed_late += u64::from(!removal.is_done());
        self.removals.push((id, removal));
        // Some requests still name it.
        if self.random.chance(50) {
            self.adapters.retain(|other| *other != id);
        }
    }

    /// Holds an adapter, or releases one.
    fn change_holds(&mut self) {
        if self.random.chance(60)
            && let Some(id) =
                (!self.adapters.is_empty()).then(|| self.adapters[self.random.below(self.adapters.len())])
        {
            self.harness.handle(Message::HoldAdapter(id));
            let is_removed =
                self.removals.iter().any(|(removed, removal)| *removed == id && removal.is_done());
            let holds = if is_removed { &mut self.ended_holds } else { &mut self.holds };
            holds.push(id);
        } else {
            self.release();
        }
    }

    /// Releases an adapter, if one is held.
    fn release(&mut self) {
        let released = self.ended_holds.pop().or_else(|| self.holds.pop());
        if let Some(id) = released {
            self.harness.handle(Message::ReleaseAdapter(id));
        }
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

    /// Without more arrivals, all requests that are read end, whether or not the others do. The others are paused.
    fn finish_readers(&mut self) {
        self.run_to_the_end();
        let mut readers = self.observed.iter().filter(|observed| observed.habit.is_reading());
        assert!(readers.all(|reader| reader.end.is_some()), "starved by unread requests");
        let stats = self.harness.stats();
        assert_eq!(stats.running + stats.waiting, stats.paused, "a request waits for paused ones");
        self.seen.paused_waiting += u64::from(stats.paused > 0 && stats.waiting > 0);
    }

    /// If all are read or dropped, all end.
    fn finish_all(&mut self) {
        for observed in &mut self.observed {
            if observed.habit == Habit::NeverReads && observed.end.is_none() {
                observed.is_cancelled = true;
                observed.client.cancel();
            }
            observed.habit = Habit::Reads;
            // A paused sequence resumes after the plans in flight.
            observed.last_progress = self.harness.stats().steps + DEPTH as u64;
        }
        self.run_to_the_end();
        self.check_holds();
        while !self.holds.is_empty() || !self.ended_holds.is_empty() {
            self.release();
        }
        assert!(self.harness.core.is_idle());
        let stats = self.harness.stats();
        assert_eq!((stats.running, stats.waiting, stats.paused), (0, 0, 0));
        assert_eq!((stats.blocks_used, stats.blocks_reserved), (0, 0));
        assert!(self.removals.iter().all(|(_, removal)| removal.is_done()), "an adapter is left");
    }

    /// In a bounded number of steps: in each, the first in scheduling order computes at least one token, or its row is
    /// deferred and computed again.
    fn run_to_the_end(&mut self) {
        let open = self.observed.iter().filter(|observed| observed.end.is_none());
        let num_steps: usize = open
            .map(|observed| observed.client.request.prompt.len() + observed.client.request.max_tokens + DEPTH)
            .sum();
        let last = |device: &Device| 2 * (num_steps + DEPTH + device.num_deferred as usize);
        let mut num_done = 0;
        while num_done <= last(&self.harness.device) {
            num_done += 1;
            self.read_all();
            self.check_stats();
            if !self.harness.step() {
                return self.read_all();
            }
        }
        panic!("it does not end");
    }

    /// The feed of KV events ends with the engine.
    fn end(self) -> Seen {
        let Self { harness, mirror, seen, .. } = self;
        drop(harness);
        if let Some(mirror) = mirror {
            mirror.check_end();
        }
        seen
    }

    /// Unused prefixes expire.
    fn expire_prefixes(&mut self) {
        let stats = self.harness.stats();
        self.seen.expired += u64::from(stats.blocks_cached > 0);
        self.harness.pass(300);
        self.harness.plan();
        let stats = self.harness.stats();
        if self.stopped.is_none() {
            assert_eq!((stats.blocks_cached, stats.host_blocks_used), (0, 0));
        }
    }
}
