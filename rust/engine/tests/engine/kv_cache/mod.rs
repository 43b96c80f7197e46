//! The KV cache manager against a naive reference, which keeps whole token lists and recounts everything each time.

mod reference;

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_engine::testing::{
    BlockHasher, BlockTable, Chain, Demand, KvAllocation, KvCacheManager, LoadLimit, Namespace,
    SwappedBlocks, Tokens,
};
use penstock_engine::{Limits, PreemptionMode, StepPlan};

use self::reference::{Key, RefTable, Reference};
use crate::harness::limits;
use crate::random::Random;

const NUM_SCHEDULES: u64 = 3_000;

/// A sequence with blocks, in the manager and in the reference.
struct Running {
    table: BlockTable,
    chain: Chain,
    reference: RefTable,
}

/// The number of times that all schedules together met each case.
#[derive(Debug, Default)]
struct Seen {
    device_hits: u64,
    host_hits: u64,
    rejected: u64,
    evicted: u64,
    expired: u64,
    restored: u64,
    discarded: u64,
    reset: u64,
    extended: u64,
}

struct World {
    random: Random,
    start: Instant,
    kv: KvCacheManager,
    running: Vec<Running>,
    /// With the blocks that the reference knows to be swapped.
    swapped: Vec<(SwappedBlocks, RefTable, Chain)>,
    reference: Reference,
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
            kv: KvCacheManager::new(&limits, hasher),
            start: Instant::now(),
            running: vec![],
            swapped: vec![],
            reference: Reference {
                num_blocks,
                host_blocks,
                host_prefixes,
                block_size,
                ttl,
                ..Reference::default()
            },
            random,
            seen,
        }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.reference.now)
    }

    fn references(&self) -> Vec<RefTable> {
        self.running.iter().map(|running| running.reference.clone()).collect()
    }

    fn act(&mut self) {
        if self.running.len() > self.random.between(1, 8) {
            self.free(false);
        }
        match self.random.below(23) {
            0..5 => self.allocate(None),
            5..9 if !self.running.is_empty() => self.grow(),
            9..13 if !self.running.is_empty() => self.publish(),
            13..16 if !self.running.is_empty() => self.free(false),
            16 if !self.running.is_empty() => self.free(true),
            17 if !self.swapped.is_empty() => {
                let index = self.random.below(self.swapped.len());
                let swapped = self.swapped.swap_remove(index);
                self.allocate(Some(swapped));
            }
            18 => self.reference.now += self.random.below(20) as u64,
            19 if self.random.chance(20) => self.reset(),
            20..23 if !self.running.is_empty() => self.extend(),
            _ => self.kv.begin_step(&mut StepPlan::default()),
        }
        self.kv.expire(self.now());
        self.reference.expire(&mut self.seen);
        self.check();
    }

    fn random_table(&mut self) -> (RefTable, Chain) {
        let random = &mut self.random;
        let num_tokens = random.between(1, 4 * self.reference.block_size);
        let tokens: Vec<u32> = (0..num_tokens).map(|_| random.below(10) as u32 / 8).collect();
        let salt = [None, Some(""), Some("mine")][random.below(3)];
        let max_shared = [0, 2, usize::MAX, usize::MAX][random.below(4)];
        let chain = Chain::new(Namespace { salt: salt.map(Arc::from), adapter: None }, max_shared, 0);
        let (num_blocks, num_reserved, num_published, is_reset) = (0, 0, 0, false);
        (RefTable { salt, tokens, max_shared, num_blocks, num_reserved, num_published, is_reset }, chain)
    }

    fn allocate(&mut self, swapped: Option<(SwappedBlocks, RefTable, Chain)>) {
        let (mut swapped, (mut wanted, mut chain)) = match swapped {
            Some((swapped, reference, chain)) => (Some(swapped), (reference, chain)),
            None => (None, self.random_table()),
        };
        let (now, block_size) = (self.now(), self.reference.block_size);
        let max_tokens = wanted.tokens.len() - 1;
        let hit = self.kv.match_prefix(&mut chain, tokens(&wanted.tokens), max_tokens, now);
        let found = hit.cached();
        self.reference.expire(&mut self.seen);
        let tables = self.references();
        assert_eq!(found, self.reference.find(&wanted, max_tokens / block_size, &tables));

        let num_blocks = wanted.tokens.len().div_ceil(block_size);
        let watermark = self.random.below(3);
        let swapped_before =
            swapped.as_ref().map(|swapped| (swapped.first, swapped.blocks.len(), swapped.num_tokens));
        let num_tokens = wanted.tokens.len();
        let demand = Demand { num_tokens, max_tokens: num_tokens, watermark };
        let could_allocate = self.kv.could_allocate(&demand, &chain, max_tokens);
        let num_freed = self.random.below(self.running.len() + 1);
        let freed = self.running[..num_freed].iter().map(|running| &running.table);
        let fits = num_blocks + watermark <= self.reference.num_available(&tables[num_freed..]);
        assert_eq!(self.kv.could_allocate_without(&demand, freed), fits);
        let allocated = match self.kv.allocate(hit, &mut swapped, &demand, LoadLimit::None, now) {
            KvAllocation::Allocated(table, num_computed) => Some((table, num_computed)),
            KvAllocation::OutOfBlocks => None,
            KvAllocation::Staged(_) => unreachable!("any number of blocks may be loaded"),
        };
        assert!(could_allocate || allocated.is_none(), "the estimate without a lookup is optimistic");
        let (device, host) = (found.device / block_size, found.host / block_size);
        let num_found = device + host;
        let restored =
            swapped_before.filter(|(first, ..)| *first == 0 || !wanted.is_reset && *first <= num_found);
        let num_found = restored.map_or(num_found, |(first, ..)| first);
        let keys: Vec<Key> = (0..num_found).map(|index| wanted.key(index, block_size)).collect();
        let num_in_use = keys.iter().filter(|key| self.reference.is_referenced(key, &tables)).count();
        let fits = num_blocks - num_in_use + watermark <= self.reference.num_available(&tables);
        assert_eq!(allocated.is_some(), fits);
        let Some((table, num_computed)) = allocated else {
            self.seen.rejected += 1;
            if let Some(swapped) = swapped {
                self.swapped.push((swapped, wanted, chain));
            }
            return;
        };
        assert!(swapped.is_none());
        let num_loaded = host.min(num_found.saturating_sub(device));
        self.seen.device_hits += (num_found - num_loaded) as u64;
        self.seen.host_hits += num_loaded as u64;
        let on_host: Vec<Key> = keys[num_found - num_loaded..].to_vec();
        self.reference.device.retain(|(key, _)| !keys.contains(key));
        // They stay on the host until each is loaded, but none is evicted for another.
        self.reference.host.retain(|(key, _)| !on_host.contains(key));
        self.reference.num_swapped += on_host.len();
        wanted.num_published = num_found - num_loaded;
        wanted.num_blocks = wanted.num_published;
        wanted.num_reserved = num_blocks - wanted.num_blocks;
        for _ in on_host {
            self.allocate_block(&mut wanted, &tables);
            wanted.num_published += 1;
            self.reference.num_swapped -= 1;
        }
        let mut expected = num_found * block_size;
        if let Some((_, num_swapped, num_tokens)) = restored {
            self.seen.restored += 1;
            for _ in 0..num_swapped {
                self.allocate_block(&mut wanted, &tables);
                self.reference.num_swapped -= 1;
            }
            expected = num_tokens;
        } else if let Some((_, num_swapped, _)) = swapped_before {
            self.seen.discarded += 1;
            self.reference.num_swapped -= num_swapped;
        }
        assert_eq!(num_computed, expected);
        wanted.is_reset &= restored.is_some();
        self.running.push(Running { table, chain, reference: wanted });
    }

    /// Allocates one block of the reference's reservation.
    fn allocate_block(&mut self, table: &mut RefTable, others: &[RefTable]) {
        let tables: Vec<RefTable> = others.iter().chain([&*table]).cloned().collect();
        let num_used = self.reference.num_used(&tables);
        self.reference.allocate(num_used, &mut self.seen);
        table.num_blocks += 1;
        table.num_reserved -= 1;
    }

    fn grow(&mut self) {
        let index = self.random.below(self.running.len());
        let by = self.random.below(4);
        self.grow_at(index, by);
    }

    fn grow_at(&mut self, index: usize, by: usize) {
        let num_available = self.reference.num_available(&self.references());
        let mut running = self.running.remove(index);
        let others = self.references();
        let num_blocks = running.reference.num_blocks + by;
        let num_unreserved = by.saturating_sub(running.reference.num_reserved);
        let has_grown = self.kv.grow(&mut running.table, num_blocks * self.reference.block_size);
        assert_eq!(has_grown, num_unreserved <= num_available);
        if has_grown {
            running.reference.num_reserved += num_unreserved;
            for _ in 0..by {
                self.allocate_block(&mut running.reference, &others);
            }
            let more = running.reference.num_blocks * self.reference.block_size;
            while running.reference.tokens.len() < more {
                running.reference.tokens.push(self.random.below(10) as u32 / 8);
            }
        }
        self.running.insert(index, running);
    }

    fn extend(&mut self) {
        let (index, now, block_size) =
            (self.random.below(self.running.len()), self.now(), self.reference.block_size);
        let tables = self.references();
        let Running { table, chain, reference } = &mut self.running[index];
        let num_tokens = reference.tokens.len();
        let max_tokens = self
            .random
            .between(reference.num_blocks * block_size, num_tokens.max(reference.num_blocks * block_size));
        let before = reference.num_published;
        self.reference.expire(&mut self.seen);
        let mut end = before;
        if !reference.is_reset && reference.num_blocks == before {
            let found = self.reference.find(reference, max_tokens / block_size, &tables).device / block_size;
            end = found.min(before + reference.num_reserved).max(before);
        }
        let added = self.kv.extend(table, chain, tokens(&reference.tokens), max_tokens, now);
        assert_eq!(added, (end - before) * block_size);
        for index in before..end {
            self.reference.remove(&reference.key(index, block_size));
        }
        reference.num_published = end;
        reference.num_blocks += end - before;
        reference.num_reserved -= end - before;
        self.seen.extended += (end - before) as u64;
    }

    fn publish(&mut self) {
        let index = self.random.below(self.running.len());
        let most = self.random.below(12);
        self.publish_at(index, most);
    }

    fn publish_at(&mut self, index: usize, most: usize) {
        let (block_size, now) = (self.reference.block_size, self.now());
        let Running { table, chain, reference } = &mut self.running[index];
        let num_computed = (reference.num_blocks * block_size).min(reference.tokens.len()).min(most);
        self.kv.publish(table, chain, tokens(&reference.tokens), num_computed, now);
        let end = (num_computed / block_size).min(reference.max_shared);
        if !reference.is_reset {
            for index in reference.num_published..end {
                self.reference.remove(&reference.key(index, block_size));
                reference.num_published += 1;
            }
        }
    }

    fn free(&mut self, is_swapped_out: bool) {
        let index = self.random.below(self.running.len());
        if self.random.chance(60) {
            self.grow_at(index, self.running[index].reference.num_reserved);
            self.publish_at(index, usize::MAX);
        }
        let Running { table, mut reference, chain } = self.running.swap_remove(index);
        let block_size = self.reference.block_size;
        let num_tokens = (table.blocks().len() * block_size).min(reference.tokens.len().saturating_sub(1));
        if is_swapped_out && num_tokens > 0 && table.blocks().len() == num_tokens.div_ceil(block_size) {
            let first = if reference.is_reset { 0 } else { reference.num_published };
            let num_wanted = reference.num_blocks - first;
            let swapped = self.kv.swap_out(&table, num_tokens);
            let fits =
                num_wanted > 0 && num_wanted + self.reference.num_swapped <= self.reference.host_blocks;
            assert_eq!(swapped.is_some(), fits);
            if let Some(swapped) = swapped {
                for _ in 0..num_wanted {
                    assert!(self.reference.take_on_host());
                    self.reference.num_swapped += 1;
                }
                let (num_blocks, num_reserved, num_published) = (0, 0, 0);
                let later = RefTable { num_blocks, num_reserved, num_published, ..reference.clone() };
                self.swapped.push((swapped, later, chain));
            }
        }
        self.kv.free(table, self.start + Duration::from_secs(self.reference.now));
        reference.num_published *= usize::from(!reference.is_reset);
        let others = self.references();
        for index in (0..reference.num_published).rev() {
            let key = reference.key(index, block_size);
            if !self.reference.is_referenced(&key, &others) {
                self.reference.device.push((key, self.reference.now));
            }
        }
    }

    /// Resets one namespace, or all of them.
    fn reset(&mut self) {
        let salt = [None, None, Some(None), Some(Some("")), Some(Some("mine"))][self.random.below(5)];
        let is_reset = |other: Option<&str>| salt.is_none_or(|salt| salt == other);
        self.seen.reset += 1;
        self.reference.device.retain(|((other, _), _)| !is_reset(*other));
        self.reference.host.retain(|((other, _), _)| !is_reset(*other));
        match salt {
            None => self.kv.reset_prefix_cache(),
            Some(salt) => {
                let running = self.running.iter_mut().filter(|running| running.reference.salt == salt);
                running.for_each(|running| running.table.unpublish());
                let swapped = self.swapped.iter_mut().filter(|(_, reference, _)| reference.salt == salt);
                swapped.for_each(|(swapped, ..)| swapped.unpublish());
                self.kv.reset_namespace(&Namespace { salt: salt.map(Arc::from), adapter: None });
            }
        }
        // A shared block counts once per table in the reference from now on, so those tables go.
        let (mut kept, now) = (vec![], self.now());
        for Running { table, chain, mut reference } in self.running.drain(..) {
            if is_reset(reference.salt) && reference.num_published > 0 {
                self.kv.free(table, now);
            } else {
                reference.is_reset |= is_reset(reference.salt);
                kept.push(Running { table, chain, reference });
            }
        }
        self.running = kept;
        let swapped = self.swapped.iter_mut().filter(|(_, reference, _)| is_reset(reference.salt));
        swapped.for_each(|(_, reference, _)| reference.is_reset = true);
    }

    fn check(&self) {
        let tables = self.running.iter().map(|running| &running.table);
        self.kv.check_integrity(tables, self.swapped.iter().map(|(swapped, ..)| swapped));
        let references = self.references();
        let (pool, host) = (self.kv.pool(), self.kv.host());
        assert_eq!(pool.num_used(), self.reference.num_used(&references));
        assert_eq!(pool.num_cached(), self.reference.device.len());
        assert_eq!(pool.num_available(), self.reference.num_available(&references));
        assert_eq!(
            host.num_blocks() - host.num_free(),
            self.reference.host.len() + self.reference.num_swapped
        );
        for Running { table, reference, .. } in &self.running {
            assert_eq!(
                (table.blocks().len(), table.num_reserved()),
                (reference.num_blocks, reference.num_reserved)
            );
        }
    }

    fn end(mut self) -> Seen {
        let now = self.now();
        self.running.drain(..).for_each(|running| self.kv.free(running.table, now));
        self.swapped.drain(..).for_each(|(swapped, ..)| self.kv.discard(swapped));
        self.kv.expire(now + Duration::from_secs(self.reference.ttl));
        self.kv.check_integrity([].iter(), [].iter());
        assert_eq!((self.kv.pool().num_used(), self.kv.pool().num_cached()), (0, 0));
        assert_eq!(self.kv.host().num_free(), self.kv.host().num_blocks());
        self.seen
    }
}

fn tokens(prompt: &[u32]) -> Tokens<'_> {
    Tokens { prompt, generated: &[] }
}

#[test]
fn the_manager_agrees_with_the_naive_reference() {
    let mut seen = Seen::default();
    for seed in 0..NUM_SCHEDULES {
        let mut world = World::new(seed, seen);
        for _ in 0..world.random.between(20, 150) {
            world.act();
        }
        seen = world.end();
    }
    let Seen { device_hits, host_hits, rejected, evicted, expired, restored, discarded, reset, extended } =
        seen;
    for met in [device_hits, host_hits, rejected, evicted, expired, restored, discarded, reset, extended] {
        assert!(met > NUM_SCHEDULES / 60, "a case hardly ever happened: {seen:?}");
    }
}
