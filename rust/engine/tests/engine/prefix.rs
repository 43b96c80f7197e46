//! Pool, prefix cache and host tier against a naive twin that keeps whole token lists and counts everything anew each
//! time; then what users may rely on, each a sentence.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_engine::kv::{BlockList, Found, Memory, Saved};
use penstock_engine::prefix::{BlockHasher, Chain, Namespace, Tokens};
use penstock_engine::{Limits, PreemptionMode, StepPlan};

use crate::harness::limits;
use crate::random::Random;

const NUM_SCHEDULES: u64 = 3_000;

/// What a sequence holds, as the memory knows it and as the twin does.
struct Held {
    list: BlockList,
    chain: Chain,
    twin: TwinList,
}

#[derive(Clone)]
struct TwinList {
    salt: Option<&'static str>,
    tokens: Vec<u32>,
    /// How many of its blocks may be shared.
    max_shared: usize,
    num_blocks: usize,
    num_reserved: usize,
    num_published: usize,
    is_flushed: bool,
}

/// One cached block by its whole contents: where it may be found, and all tokens up to its end.
type Key = (Option<&'static str>, Vec<u32>);

#[derive(Default)]
struct Twin {
    num_blocks: usize,
    host_blocks: usize,
    host_prefixes: bool,
    block_size: usize,
    ttl: u64,
    now: u64,
    /// Blocks that nobody holds and when they were used last, oldest first.
    device: Vec<(Key, u64)>,
    host: Vec<(Key, u64)>,
    num_saved: usize,
}

/// What all schedules together have met.
#[derive(Debug, Default)]
struct Seen {
    device_hits: u64,
    host_hits: u64,
    refused: u64,
    evicted: u64,
    expired: u64,
    restored: u64,
    discarded: u64,
    flushed: u64,
}

impl TwinList {
    fn key(&self, index: usize, block_size: usize) -> Key {
        (self.salt, self.tokens[..(index + 1) * block_size].to_vec())
    }
}

impl Twin {
    fn is_held(&self, key: &Key, others: &[TwinList]) -> bool {
        others.iter().any(|list| {
            list.salt == key.0
                && !list.is_flushed
                && list.tokens[..list.num_published * self.block_size].starts_with(&key.1)
        })
    }

    fn num_used(&self, lists: &[TwinList]) -> usize {
        let mut shared: Vec<Key> = lists
            .iter()
            .filter(|list| !list.is_flushed)
            .flat_map(|list| (0..list.num_published).map(|index| list.key(index, self.block_size)))
            .collect();
        shared.sort();
        shared.dedup();
        let private = |list: &TwinList| list.num_blocks - list.num_published;
        shared.len() + lists.iter().map(private).sum::<usize>()
    }

    fn num_available(&self, lists: &[TwinList]) -> usize {
        self.num_blocks - self.num_used(lists) - lists.iter().map(|list| list.num_reserved).sum::<usize>()
    }

    fn find(&self, wanted: &TwinList, max_blocks: usize, lists: &[TwinList]) -> Found {
        let mut found = Found::default();
        for index in 0..max_blocks.min(wanted.max_shared) {
            let key = wanted.key(index, self.block_size);
            if self.is_held(&key, lists) || self.device.iter().any(|(other, _)| *other == key) {
                assert_eq!(found.host, 0, "a block on the device continues one on the host");
                found.device += 1;
            } else if self.host.iter().any(|(other, _)| *other == key) {
                found.host += 1;
            } else {
                break;
            }
        }
        found
    }

    fn forget(&mut self, key: &Key) {
        self.device.retain(|(other, _)| other != key);
        self.host.retain(|(other, _)| other != key);
    }

    /// Makes room for one more used block.
    fn take(&mut self, num_used: usize, seen: &mut Seen) {
        if num_used + self.device.len() < self.num_blocks {
            return;
        }
        seen.evicted += 1;
        let evicted = self.device.remove(0);
        if self.host_prefixes && self.take_on_host() {
            self.host.push(evicted);
        }
    }

    fn take_on_host(&mut self) -> bool {
        if self.host.len() + self.num_saved == self.host_blocks {
            if self.host.is_empty() {
                return false;
            }
            self.host.remove(0);
        }
        true
    }

    fn expire(&mut self, seen: &mut Seen) {
        let before = self.device.len() + self.host.len();
        let is_fresh = |(_, last_used): &(Key, u64)| self.now - last_used < self.ttl;
        self.device.retain(is_fresh);
        self.host.retain(is_fresh);
        seen.expired += (before - self.device.len() - self.host.len()) as u64;
    }
}

struct World {
    random: Random,
    start: Instant,
    memory: Memory,
    held: Vec<Held>,
    /// With the blocks that the twin knows to be saved.
    saved: Vec<(Saved, TwinList, Chain)>,
    twin: Twin,
    seen: Seen,
}

impl World {
    fn new(seed: u64, seen: Seen) -> Self {
        let mut random = Random(seed);
        let hasher = match random.below(4) {
            0 => BlockHasher::with_function(0, |_, _, _| 0),
            1 => BlockHasher::with_function(0, |_, parent, tokens| {
                (parent + tokens.iter().sum::<u32>() as u128) % 4
            }),
            _ => BlockHasher::new(u128::from(seed)),
        };
        let (num_blocks, host_blocks) = (random.between(2, 12), random.below(12));
        let host_prefixes = random.chance(80);
        let (block_size, ttl) = (random.between(1, 3), random.between(10, 200) as u64);
        let limits = Limits {
            num_blocks,
            host_blocks,
            host_prefixes,
            block_size,
            prefix_cache_ttl: Some(Duration::from_secs(ttl)),
            preemption_mode: PreemptionMode::Swap,
            ..limits()
        };
        Self {
            memory: Memory::new(&limits, hasher),
            start: Instant::now(),
            held: vec![],
            saved: vec![],
            twin: Twin { num_blocks, host_blocks, host_prefixes, block_size, ttl, ..Twin::default() },
            random,
            seen,
        }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.twin.now)
    }

    fn twins(&self) -> Vec<TwinList> {
        self.held.iter().map(|held| held.twin.clone()).collect()
    }

    fn act(&mut self) {
        if self.held.len() > self.random.between(1, 8) {
            self.give_back(false);
        }
        match self.random.below(20) {
            0..5 => self.open(None),
            5..9 if !self.held.is_empty() => self.grow(),
            9..13 if !self.held.is_empty() => self.publish(),
            13..16 if !self.held.is_empty() => self.give_back(false),
            16 if !self.held.is_empty() => self.give_back(true),
            17 if !self.saved.is_empty() => {
                let index = self.random.below(self.saved.len());
                let saved = self.saved.swap_remove(index);
                self.open(Some(saved));
            }
            18 => self.twin.now += self.random.below(20) as u64,
            19 if self.random.chance(20) => self.flush(),
            _ => self.memory.submit(&mut StepPlan::default()),
        }
        self.memory.expire(self.now());
        self.twin.expire(&mut self.seen);
        self.check();
    }

    fn random_list(&mut self) -> (TwinList, Chain) {
        let random = &mut self.random;
        let num_tokens = random.between(1, 4 * self.twin.block_size);
        let tokens: Vec<u32> = (0..num_tokens).map(|_| random.below(10) as u32 / 8).collect();
        let salt = [None, Some(""), Some("mine")][random.below(3)];
        let max_shared = [0, 2, usize::MAX, usize::MAX][random.below(4)];
        let chain = Chain::new(Namespace { salt: salt.map(Arc::from) }, max_shared, 0);
        let (num_blocks, num_reserved, num_published, is_flushed) = (0, 0, 0, false);
        (TwinList { salt, tokens, max_shared, num_blocks, num_reserved, num_published, is_flushed }, chain)
    }

    fn open(&mut self, saved: Option<(Saved, TwinList, Chain)>) {
        let (mut saved, (mut wanted, mut chain)) = match saved {
            Some((saved, twin, chain)) => (Some(saved), (twin, chain)),
            None => (None, self.random_list()),
        };
        let (now, block_size) = (self.now(), self.twin.block_size);
        let max_found = (wanted.tokens.len() - 1) / block_size;
        let found = self.memory.find(&mut chain, tokens(&wanted.tokens), max_found, now);
        self.twin.expire(&mut self.seen);
        let lists = self.twins();
        assert_eq!(found, self.twin.find(&wanted, max_found, &lists));

        let num_blocks = wanted.tokens.len().div_ceil(block_size);
        let headroom = self.random.below(3);
        let saved_before = saved.as_ref().map(|saved| (saved.first, saved.blocks.len(), saved.num_tokens));
        let opened = self.memory.open(&mut saved, num_blocks, headroom, num_blocks);
        let num_found = found.device + found.host;
        let restored =
            saved_before.filter(|(first, ..)| *first == 0 || !wanted.is_flushed && *first <= num_found);
        let num_found = restored.map_or(num_found, |(first, ..)| first);
        let keys: Vec<Key> = (0..num_found).map(|index| wanted.key(index, block_size)).collect();
        let num_held = keys.iter().filter(|key| self.twin.is_held(key, &lists)).count();
        let fits = num_blocks - num_held + headroom <= self.twin.num_available(&lists);
        assert_eq!(opened.is_some(), fits);
        let Some((list, num_computed)) = opened else {
            self.seen.refused += 1;
            if let Some(saved) = saved {
                self.saved.push((saved, wanted, chain));
            }
            return;
        };
        assert!(saved.is_none());
        let num_loaded = found.host.min(num_found.saturating_sub(found.device));
        self.seen.device_hits += (num_found - num_loaded) as u64;
        self.seen.host_hits += num_loaded as u64;
        let on_host: Vec<Key> = keys[num_found - num_loaded..].to_vec();
        self.twin.device.retain(|(key, _)| !keys.contains(key));
        // They keep their places on the host until each is loaded, but none is forgotten for another.
        self.twin.host.retain(|(key, _)| !on_host.contains(key));
        self.twin.num_saved += on_host.len();
        wanted.num_published = num_found - num_loaded;
        wanted.num_blocks = wanted.num_published;
        wanted.num_reserved = num_blocks - wanted.num_blocks;
        for _ in on_host {
            self.take(&mut wanted, &lists);
            wanted.num_published += 1;
            self.twin.num_saved -= 1;
        }
        let mut expected = num_found * block_size;
        if let Some((_, num_saved, num_tokens)) = restored {
            self.seen.restored += 1;
            for _ in 0..num_saved {
                self.take(&mut wanted, &lists);
                self.twin.num_saved -= 1;
            }
            expected = num_tokens;
        } else if let Some((_, num_saved, _)) = saved_before {
            self.seen.discarded += 1;
            self.twin.num_saved -= num_saved;
        }
        assert_eq!(num_computed, expected);
        wanted.is_flushed &= restored.is_some();
        self.held.push(Held { list, chain, twin: wanted });
    }

    /// One block of the twin's reservation is taken.
    fn take(&mut self, list: &mut TwinList, others: &[TwinList]) {
        let lists: Vec<TwinList> = others.iter().chain([&*list]).cloned().collect();
        let num_used = self.twin.num_used(&lists);
        self.twin.take(num_used, &mut self.seen);
        list.num_blocks += 1;
        list.num_reserved -= 1;
    }

    fn grow(&mut self) {
        let index = self.random.below(self.held.len());
        let by = self.random.below(4);
        self.grow_at(index, by);
    }

    fn grow_at(&mut self, index: usize, by: usize) {
        let num_available = self.twin.num_available(&self.twins());
        let mut held = self.held.remove(index);
        let others = self.twins();
        let num_blocks = held.twin.num_blocks + by;
        let num_unpromised = by.saturating_sub(held.twin.num_reserved);
        let has_grown = self.memory.grow(&mut held.list, num_blocks);
        assert_eq!(has_grown, num_unpromised <= num_available);
        if has_grown {
            held.twin.num_reserved += num_unpromised;
            for _ in 0..by {
                self.take(&mut held.twin, &others);
            }
            let more = held.twin.num_blocks * self.twin.block_size;
            while held.twin.tokens.len() < more {
                held.twin.tokens.push(self.random.below(10) as u32 / 8);
            }
        }
        self.held.insert(index, held);
    }

    fn publish(&mut self) {
        let index = self.random.below(self.held.len());
        let most = self.random.below(12);
        self.publish_at(index, most);
    }

    fn publish_at(&mut self, index: usize, most: usize) {
        let (block_size, now) = (self.twin.block_size, self.now());
        let Held { list, chain, twin } = &mut self.held[index];
        let num_computed = (twin.num_blocks * block_size).min(twin.tokens.len()).min(most);
        self.memory.publish(list, chain, tokens(&twin.tokens), num_computed, now);
        let end = (num_computed / block_size).min(twin.max_shared);
        if !twin.is_flushed {
            for index in twin.num_published..end {
                self.twin.forget(&twin.key(index, block_size));
                twin.num_published += 1;
            }
        }
    }

    fn give_back(&mut self, is_saved: bool) {
        let index = self.random.below(self.held.len());
        if self.random.chance(60) {
            self.grow_at(index, self.held[index].twin.num_reserved);
            self.publish_at(index, usize::MAX);
        }
        let Held { list, mut twin, chain } = self.held.swap_remove(index);
        let block_size = self.twin.block_size;
        let num_tokens = (list.blocks().len() * block_size).min(twin.tokens.len().saturating_sub(1));
        if is_saved && num_tokens > 0 && list.blocks().len() == num_tokens.div_ceil(block_size) {
            let first = if twin.is_flushed { 0 } else { twin.num_published };
            let num_wanted = twin.num_blocks - first;
            let saved = self.memory.save(&list, num_tokens);
            let fits = num_wanted > 0 && num_wanted + self.twin.num_saved <= self.twin.host_blocks;
            assert_eq!(saved.is_some(), fits);
            if let Some(saved) = saved {
                for _ in 0..num_wanted {
                    assert!(self.twin.take_on_host());
                    self.twin.num_saved += 1;
                }
                let (num_blocks, num_reserved, num_published) = (0, 0, 0);
                let later = TwinList { num_blocks, num_reserved, num_published, ..twin.clone() };
                self.saved.push((saved, later, chain));
            }
        }
        self.memory.give_back(list, self.start + Duration::from_secs(self.twin.now));
        twin.num_published *= usize::from(!twin.is_flushed);
        let others = self.twins();
        for index in (0..twin.num_published).rev() {
            let key = twin.key(index, block_size);
            if !self.twin.is_held(&key, &others) {
                self.twin.device.push((key, self.twin.now));
            }
        }
    }

    fn flush(&mut self) {
        self.memory.flush();
        self.seen.flushed += 1;
        self.twin.device.clear();
        self.twin.host.clear();
        // A block that several held is several for the twin from now on, so those go.
        let (mut kept, now) = (vec![], self.now());
        for Held { list, chain, mut twin } in self.held.drain(..) {
            if twin.num_published > 0 {
                self.memory.give_back(list, now);
            } else {
                twin.is_flushed = true;
                kept.push(Held { list, chain, twin });
            }
        }
        self.held = kept;
        self.saved.iter_mut().for_each(|(_, twin, _)| twin.is_flushed = true);
    }

    fn check(&self) {
        let lists = self.held.iter().map(|held| &held.list);
        self.memory.check_integrity(lists, self.saved.iter().map(|(saved, ..)| saved));
        let twins = self.twins();
        let (pool, host) = (self.memory.pool(), self.memory.host());
        assert_eq!(pool.num_used(), self.twin.num_used(&twins));
        assert_eq!(pool.num_kept(), self.twin.device.len());
        assert_eq!(pool.num_available(), self.twin.num_available(&twins));
        assert_eq!(host.num_blocks() - host.num_free(), self.twin.host.len() + self.twin.num_saved);
        for Held { list, twin, .. } in &self.held {
            assert_eq!((list.blocks().len(), list.num_reserved()), (twin.num_blocks, twin.num_reserved));
        }
    }

    fn end(mut self) -> Seen {
        let now = self.now();
        self.held.drain(..).for_each(|held| self.memory.give_back(held.list, now));
        self.saved.drain(..).for_each(|(saved, ..)| self.memory.discard(saved));
        self.memory.expire(now + Duration::from_secs(self.twin.ttl));
        self.memory.check_integrity([].iter(), [].iter());
        assert_eq!((self.memory.pool().num_used(), self.memory.pool().num_kept()), (0, 0));
        assert_eq!(self.memory.host().num_free(), self.memory.host().num_blocks());
        self.seen
    }
}

fn tokens(prompt: &[u32]) -> Tokens<'_> {
    Tokens { prompt, generated: &[] }
}

#[test]
fn the_memory_does_what_its_naive_twin_does() {
    let mut seen = Seen::default();
    for seed in 0..NUM_SCHEDULES {
        let mut world = World::new(seed, seen);
        for _ in 0..world.random.between(20, 150) {
            world.act();
        }
        seen = world.end();
    }
    let Seen { device_hits, host_hits, refused, evicted, expired, restored, discarded, flushed } = seen;
    for met in [device_hits, host_hits, refused, evicted, expired, restored, discarded, flushed] {
        assert!(met > NUM_SCHEDULES / 60, "something hardly ever happened: {seen:?}");
    }
}
