//! [`KvCacheManager`]: block pool, prefix cache and host tier as one. The scheduler allocates from it and frees to it.
//!
//! A block is taken from the free ones; without any, the least recently used cached block is evicted, and saved in the
//! host tier if that has a free block or an older prefix to drop. If nothing is left to evict, the scheduler has to
//! preempt.

use std::time::Instant;

use penstock_types::{BlockCopy, BlockId, HostBlockId};

use super::block_pool::BlockPool;
use super::block_table::BlockTable;
use super::host_pool::{HostPool, SwappedBlocks};
use super::prefix_match::PrefixMatch;
use crate::limits::Limits;
use crate::prefix_cache::{BlockHasher, Chain, Location, NodeId, PrefixCache, Tokens};
use crate::step::StepPlan;

/// Once one plan has this many copies, those for newly admitted sequences wait for the next plan: the rows of a plan
/// wait for its copies. A few hundred blocks take some milliseconds.
pub(super) const MAX_COPIES: usize = 256;

/// See the module.
///
/// Invariants: those of its parts; a block is cached exactly if the prefix cache has it and no table contains it.
pub struct KvCacheManager {
    pub(super) block_size: usize,
    pub(super) pool: BlockPool,
    pub(super) prefix_cache: Option<PrefixCache>,
    pub(super) host: HostPool,
    /// Whether the host tier keeps prefixes.
    host_prefixes: bool,
    /// The copies of the next plan, in the order in which they were decided.
    pub(super) copies: Vec<BlockCopy>,
    /// The step of the next plan.
    pub(super) next_step: u64,
    /// Sequences that are swapped out.
    pub(super) num_swapped: usize,
    /// Scratch of `would_free`: in how many of its tables a block is.
    num_references: Vec<u32>,
    /// The number of blocks that `would_free` has looked at.
    #[cfg(any(test, feature = "testing"))]
    num_visited: u64,
}

/// The blocks that a waiting sequence needs to be scheduled.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Tokens that its table must hold; the blocks that are not allocated at once are reserved.
    pub num_tokens: usize,
    /// The most tokens that its table will ever hold.
    pub max_tokens: usize,
    /// Blocks that must stay available: one for each running sequence that may still grow.
    pub watermark: usize,
}

/// The number of blocks that the next plan may load from the host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadLimit {
    /// The plan may load a bounded number, so that its other rows are not delayed for long.
    PerPlan,
    /// The plan may load any number.
    None,
}

/// The outcome of [`KvCacheManager::allocate`].
#[derive(Debug)]
pub enum KvAllocation {
    /// The blocks, and the number of first tokens whose contents they have.
    Allocated(BlockTable, usize),
    /// More has to be loaded from the host tier than one plan may. This many tokens more are in the KV cache once the
    /// next plan has run.
    Staged(usize),
    /// Too few blocks are available. Nothing has changed.
    OutOfBlocks,
}

impl KvCacheManager {
    /// An empty cache. `limits` have been validated.
    pub fn new(limits: &Limits, hasher: BlockHasher) -> Self {
        let Limits { num_blocks, host_blocks, host_prefixes, block_size, .. } = *limits;
        let cache = |ttl| PrefixCache::new(num_blocks, host_blocks, block_size, ttl, hasher);
        Self {
            block_size,
            pool: BlockPool::new(num_blocks),
            prefix_cache: limits.prefix_cache_ttl.map(cache),
            host: HostPool::new(host_blocks),
            host_prefixes,
            copies: Vec::new(),
            next_step: 1,
            num_swapped: 0,
            num_references: vec![0; num_blocks],
            #[cfg(any(test, feature = "testing"))]
            num_visited: 0,
        }
    }

    /// The number of sequences that are swapped out.
    pub fn num_swapped(&self) -> usize {
        self.num_swapped
    }

    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Looks up the longest cached prefix of a sequence, of at most `max_tokens` tokens.
    pub fn match_prefix(
        &mut self,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        max_tokens: usize,
        now: Instant,
    ) -> PrefixMatch {
        self.expire(now);
        let mut hit = PrefixMatch { block_size: self.block_size, ..PrefixMatch::default() };
        let Some(cache) = &self.prefix_cache else { return hit };
        cache.find(chain, tokens, 0..max_tokens / self.block_size, None, &mut hit.nodes);
        let is_on_device = |node: &&NodeId| matches!(cache.location(**node), Location::Device(_));
        hit.num_on_device = hit.nodes.iter().take_while(is_on_device).count();
        hit
    }

    /// Whether `demand` could be met by the longest prefix match there can be, of at most `max_tokens` tokens. Without
    /// a lookup, which costs as much as the sequence is long.
    pub fn could_allocate(&self, demand: &Demand, chain: &Chain, max_tokens: usize) -> bool {
        let most_in_use = (max_tokens / self.block_size).min(chain.max_blocks()).min(self.pool.num_used());
        let num_blocks = self.num_blocks(demand.num_tokens);
        num_blocks - most_in_use + demand.watermark <= self.pool.num_available()
    }

    /// Whether `demand` could be met without a prefix match if `tables` were freed.
    pub fn could_allocate_without<'a>(
        &mut self,
        demand: &Demand,
        tables: impl Iterator<Item = &'a BlockTable> + Clone,
    ) -> bool {
        let num_needed = self.num_blocks(demand.num_tokens) + demand.watermark;
        self.would_free(num_needed.saturating_sub(self.pool.num_available()), tables)
    }

    /// Allocates a table that begins with the blocks of `hit`, those on the host being loaded, and continues with the
    /// `swapped` ones if they follow without a gap. If they do not, or if the cache was reset meanwhile, they are
    /// discarded.
    pub fn allocate(
        &mut self,
        mut hit: PrefixMatch,
        swapped: &mut Option<SwappedBlocks>,
        demand: &Demand,
        limit: LoadLimit,
        now: Instant,
    ) -> KvAllocation {
        let num_loadable = match limit {
            LoadLimit::PerPlan => MAX_COPIES.saturating_sub(self.copies.len()) / 2, // each may evict one to the host
            LoadLimit::None => usize::MAX,
        };
        if hit.num_on_host() <= num_loadable && (num_loadable > 0 || swapped.is_none()) {
            return match self.allocate_at_once(hit, swapped, demand) {
                Some((table, num_computed)) => KvAllocation::Allocated(table, num_computed),
                None => KvAllocation::OutOfBlocks,
            };
        }
        // A table that is freed at once leaves what it has loaded in the prefix cache.
        hit.truncate(hit.num_on_device.saturating_add(num_loadable));
        let num_staged = hit.cached().host;
        let Some((table, _)) = self.allocate_at_once(hit, &mut None, demand) else {
            return KvAllocation::OutOfBlocks;
        };
        self.free(table, now);
        KvAllocation::Staged(num_staged)
    }

    fn allocate_at_once(
        &mut self,
        mut hit: PrefixMatch,
        swapped: &mut Option<SwappedBlocks>,
        demand: &Demand,
    ) -> Option<(BlockTable, usize)> {
        let resumes = swapped.as_ref().is_some_and(|swapped| self.can_resume(swapped, &hit));
        if let (true, Some(swapped)) = (resumes, &swapped) {
            hit.truncate(swapped.first);
        }
        let num_in_use = hit.nodes.iter().filter(|node| self.is_in_use(**node)).count();
        let num_blocks = self.num_blocks(demand.num_tokens);
        if num_blocks - num_in_use + demand.watermark > self.pool.num_available() {
            return None;
        }
        let capacity = self.num_blocks(demand.max_tokens);
        let mut table = BlockTable { blocks: Vec::with_capacity(capacity), ..BlockTable::default() };
        self.begin_with(&mut table, &hit, num_blocks);
        let mut num_computed = table.num_published * self.block_size;
        if let Some(swapped) = swapped.take() {
            match resumes {
                true => num_computed = self.swap_in(swapped, &mut table),
                false => self.discard(swapped),
            }
        }
        Some((table, num_computed))
    }

    /// Adds the blocks of `hit` to an empty table, and reserves the others of `num_blocks`.
    fn begin_with(&mut self, table: &mut BlockTable, hit: &PrefixMatch, num_blocks: usize) {
        let Some(cache) = &mut self.prefix_cache else { return self.pool.reserve(table, num_blocks) };
        table.epoch = cache.epoch();
        // All are acquired before one is loaded: loading evicts others.
        for &node in &hit.nodes {
            match cache.location(node) {
                Location::Device(block) => {
                    table.blocks.push(block);
                    if self.pool.acquire(block) {
                        cache.acquire(node);
                    }
                }
                Location::Host(_) => cache.acquire(node),
            }
            table.depends_on = table.depends_on.max(cache.loaded_in(node));
        }
        self.pool.reserve(table, num_blocks - table.blocks.len());
        for &node in &hit.nodes[table.blocks.len()..] {
            let Some(Location::Host(from)) = self.prefix_cache.as_ref().map(|cache| cache.location(node))
            else {
                panic!("{node:?} follows a block on the host; this is a bug");
            };
            let block = self.load(from, table);
            if let Some(cache) = &mut self.prefix_cache {
                cache.move_to_device(node, block, self.next_step);
            }
        }
        table.num_published = hit.nodes.len();
        table.last_published = hit.nodes.last().copied();
    }

    /// Adds a block to a table that the next plan loads from the host.
    pub(super) fn load(&mut self, from: HostBlockId, table: &mut BlockTable) -> BlockId {
        let to = self.allocate_block(table);
        self.copies.push(BlockCopy::Load { from, to });
        self.host.free(from);
        table.depends_on = self.next_step;
        to
    }

    /// Allocates blocks until `table` holds `num_tokens` tokens. False, changing nothing, if too few are available.
    pub fn grow(&mut self, table: &mut BlockTable, num_tokens: usize) -> bool {
        let num_missing = self.num_blocks(num_tokens).saturating_sub(table.blocks.len());
        let num_unreserved = num_missing.saturating_sub(table.num_reserved);
        if num_unreserved > self.pool.num_available() {
            return false;
        }
        self.pool.reserve(table, num_unreserved);
        for _ in 0..num_missing {
            self.allocate_block(table);
        }
        true
    }

    /// As `grow`, but from free blocks only and leaving `watermark` blocks available. Returns the number of tokens that
    /// `table` holds then, at least those it held before.
    pub fn grow_from_free(&mut self, table: &mut BlockTable, num_tokens: usize, watermark: usize) -> usize {
        let num_missing = self.num_blocks(num_tokens).saturating_sub(table.blocks.len());
        let fits =
            num_missing <= self.pool.num_free() && num_missing + watermark <= self.pool.num_available();
        if num_missing > 0 && fits {
            self.grow(table, num_tokens);
        }
        table.blocks.len() * self.block_size
    }

    /// Frees the last blocks of a table, which are not published, down to those that hold `num_tokens` tokens.
    pub fn shrink(&mut self, table: &mut BlockTable, num_tokens: usize) {
        let num_blocks = self.num_blocks(num_tokens).min(table.blocks.len());
        for block in table.blocks.drain(num_blocks..).rev() {
            self.pool.release(block, false);
        }
    }

    /// Frees a table. Its reservation is cancelled; blocks in no other table become cached if they are published, else
    /// free. They may be allocated again at once, although plans in flight may read and write them: see the module
    /// `kv_cache`.
    pub fn free(&mut self, mut table: BlockTable, now: Instant) {
        self.pool.cancel_reservation(&mut table);
        // The last block first: the prefix cache requires it, and the next table gets free blocks in the same order.
        for block in table.blocks.drain(..).rev() {
            let node = self.prefix_cache.as_ref().and_then(|cache| cache.node_in(block));
            let is_unreferenced = self.pool.release(block, node.is_some());
            if let (true, Some(cache), Some(node)) = (is_unreferenced, &mut self.prefix_cache, node) {
                cache.release(node, now);
            }
        }
    }

    /// Whether a table may come to need more blocks than it has and has reserved, for at most `max_tokens` tokens.
    pub fn may_grow(&self, table: &BlockTable, max_tokens: usize) -> bool {
        table.blocks.len() + table.num_reserved < self.num_blocks(max_tokens)
    }

    /// Whether the first `num_tokens` tokens of a sequence have a block that others can share.
    pub fn can_share(&self, num_tokens: usize) -> bool {
        num_tokens >= self.block_size
    }

    /// Gives the next plan, which has rows, its step and the copies decided so far. Those for sequences that are not in
    /// this plan are made early, never late.
    pub fn begin_step(&mut self, plan: &mut StepPlan) {
        plan.step = self.next_step;
        plan.copies.append(&mut self.copies);
        self.next_step += 1;
    }

    /// [`StepPlan::step`] of the next plan.
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// The state of the KV cache's blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The state of the host tier's blocks.
    pub fn host(&self) -> &HostPool {
        &self.host
    }

    /// The number of blocks that hold `num_tokens` tokens.
    pub(super) fn num_blocks(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    fn is_in_use(&self, node: NodeId) -> bool {
        let location = self.prefix_cache.as_ref().map(|cache| cache.location(node));
        matches!(location, Some(Location::Device(block)) if self.pool.ref_count(block) > 0)
    }

    /// Allocates a block out of the table's reservation.
    fn allocate_block(&mut self, table: &mut BlockTable) -> BlockId {
        if self.pool.num_free() == 0 {
            self.evict();
        }
        self.pool.allocate(table)
    }

    /// Evicts the least recently used cached block. There is one, or nothing could have been reserved.
    fn evict(&mut self) {
        let host_block = if self.host_prefixes { self.take_host_block() } else { None };
        let cache = self.prefix_cache.as_mut().expect("blocks are cached in a cache; this is a bug");
        let node = cache
            .oldest_on_device()
            .unwrap_or_else(|| panic!("no block can be evicted; this is a bug: {:?}", self.pool));
        let Location::Device(block) = cache.location(node) else {
            panic!("{node:?} is in the wrong list; this is a bug");
        };
        match host_block {
            Some(to) => {
                self.copies.push(BlockCopy::Save { from: block, to });
                cache.move_to_host(node, to);
            }
            // The host tier has no block for it: there is no tier or none for prefixes, or swapped sequences and the
            // blocks about to be loaded use it all. Nothing there follows this node, which is unreferenced.
            None => cache.remove(node),
        }
        self.pool.evict(block);
    }

    /// Takes a free block of the host tier. Without one, it drops the least recently used prefix there.
    pub(super) fn take_host_block(&mut self) -> Option<HostBlockId> {
        if let Some(block) = self.host.allocate() {
            return Some(block);
        }
        let cache = self.prefix_cache.as_mut()?;
        let node = cache.oldest_on_host()?;
        let Location::Host(block) = cache.location(node) else {
            panic!("{node:?} is in the wrong list; this is a bug");
        };
        cache.remove(node);
        Some(block)
    }

    /// Whether at least `num_needed` blocks would become available if `tables` were freed. Looks at no more blocks than
    /// it takes to know.
    fn would_free<'a>(
        &mut self,
        num_needed: usize,
        tables: impl Iterator<Item = &'a BlockTable> + Clone,
    ) -> bool {
        let blocks = || tables.clone().flat_map(|table| &table.blocks);
        let mut num_freed: usize = tables.clone().map(|table| table.num_reserved).sum();
        let mut num_visited = 0;
        for block in blocks() {
            if num_freed >= num_needed {
                break;
            }
            num_visited += 1;
            let num_references = &mut self.num_references[block.0 as usize];
            *num_references += 1;
            num_freed += usize::from(*num_references as usize == self.pool.ref_count(*block));
        }
        blocks().take(num_visited).for_each(|block| self.num_references[block.0 as usize] = 0);
        #[cfg(any(test, feature = "testing"))]
        {
            self.num_visited += num_visited as u64;
        }
        num_freed >= num_needed
    }

    /// The number of blocks that `could_allocate_without` has looked at so far.
    #[cfg(any(test, feature = "testing"))]
    pub fn num_visited(&self) -> u64 {
        self.num_visited
    }
}
