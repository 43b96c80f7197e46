//! Pool, prefix cache and host tier in one hand: what the scheduler takes blocks from and gives them back to.
//!
//! Taking is a ladder: a free block; else the one that nobody has used for longest, which is saved in the host tier if
//! that has a free block or an older prefix to forget. Where nothing is left to evict the scheduler has to preempt.

use std::time::Instant;

use penstock_types::{BlockCopy, BlockId, HostBlockId};

use super::{BlockList, BlockPool, HostPool, Saved};
use crate::executor::StepPlan;
use crate::limits::Limits;
use crate::prefix::{BlockHasher, Chain, NodeId, Place, PrefixCache, Tokens};

/// Once so many copies are decided for one plan, those for new places wait for the next: while they are made, nobody's
/// tokens come. A few hundred blocks are some milliseconds.
const MAX_COPIES: usize = 256;

/// See the module.
///
/// Invariants: those of its parts; a block is kept exactly if the prefix cache has it and no list holds it.
pub struct Memory {
    block_size: usize,
    pool: BlockPool,
    prefix: Option<PrefixCache>,
    host: HostPool,
    /// Whether prefixes may go there.
    host_prefixes: bool,
    /// Decided since the last plan was submitted, in the order of the decisions.
    copies: Vec<BlockCopy>,
    /// The step of the plan that will take them.
    next_step: u64,
    /// What `find` found.
    found: Vec<NodeId>,
    /// Scratch of `num_freed_by`: how many of its lists hold a block.
    num_holders: Vec<u32>,
}

/// What the prefix cache has of a sequence's beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks in the KV cache.
    pub device: usize,
    /// Blocks after those in the host tier.
    pub host: usize,
}

impl Memory {
    /// Everything free. `limits` have been validated.
    pub fn new(limits: &Limits, hasher: BlockHasher) -> Self {
        let Limits { num_blocks, host_blocks, host_prefixes, block_size, .. } = *limits;
        let cache = |ttl| PrefixCache::new(num_blocks, host_blocks, block_size, ttl, hasher);
        Self {
            block_size,
            pool: BlockPool::new(num_blocks),
            prefix: limits.prefix_cache_ttl.map(cache),
            host: HostPool::new(host_blocks),
            host_prefixes,
            copies: Vec::new(),
            next_step: 1,
            found: Vec::new(),
            num_holders: vec![0; num_blocks],
        }
    }

    /// Forgets what was not used for too long.
    pub fn expire(&mut self, now: Instant) {
        let Some(prefix) = &mut self.prefix else { return };
        while let Some(node) = prefix.expired(now) {
            match prefix.place(node) {
                Place::Device(block) => self.pool.release(block),
                Place::Host(block) => self.host.give_back(block),
            }
            prefix.remove(node);
        }
    }

    /// When `expire` will have something to do, if nothing happens before.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.prefix.as_ref()?.next_expiry()
    }

    /// Forgets all prefixes. What is in use stays with its users, unpublished.
    pub fn flush(&mut self) {
        let Some(prefix) = &mut self.prefix else { return };
        prefix.flush(|place| match place {
            Place::Device(block) => self.pool.release(block),
            Place::Host(block) => self.host.give_back(block),
        });
    }

    /// The plan of `step` has failed, with copies in it: nothing that it or a later plan copies can be relied on. The
    /// scheduler sees to the lists that depend on one and to the blocks saved by one.
    pub fn distrust_copies(&mut self) {
        self.flush();
        self.copies.clear();
    }

    /// Looks up at most `max_blocks` first blocks of a sequence, for an `open` that follows.
    pub fn find(&mut self, chain: &mut Chain, tokens: Tokens<'_>, max_blocks: usize, now: Instant) -> Found {
        self.expire(now);
        self.found.clear();
        let Some(prefix) = &self.prefix else { return Found::default() };
        prefix.find(chain, tokens, max_blocks, &mut self.found);
        let is_on_device = |node: &&NodeId| matches!(prefix.place(**node), Place::Device(_));
        let device = self.found.iter().take_while(is_on_device).count();
        Found { device, host: self.found.len() - device }
    }

    /// How many blocks may be loaded before the next plan so that it is not held up for long, the saves that make room for
    /// them included.
    pub fn num_loadable(&self) -> usize {
        MAX_COPIES.saturating_sub(self.copies.len()) / 2
    }

    /// A list with the promise of blocks up to `num_blocks`, and how many tokens its first blocks hold already. It
    /// starts with the blocks just found, those on the host being loaded, and goes on with the `saved` ones if nothing
    /// is missing between; if something is, or what was before them has been flushed, these are discarded. `None`,
    /// changing nothing, if with that fewer than `headroom` blocks could still be had. `capacity` blocks are as many as
    /// it will ever have.
    pub fn open(
        &mut self,
        saved: &mut Option<Saved>,
        num_blocks: usize,
        headroom: usize,
        capacity: usize,
    ) -> Option<(BlockList, usize)> {
        let epoch = self.prefix.as_ref().map_or(0, PrefixCache::epoch);
        let is_restored = saved.as_ref().is_some_and(|saved| match saved.first {
            0 => true,
            first => saved.epoch == epoch && first <= self.found.len(),
        });
        if let (true, Some(saved)) = (is_restored, &saved) {
            self.found.truncate(saved.first);
        }
        let num_held = self.found.iter().filter(|node| self.is_held(**node)).count();
        if num_blocks - num_held + headroom > self.pool.num_available() {
            return None;
        }
        let mut list = BlockList { blocks: Vec::with_capacity(capacity), ..BlockList::default() };
        self.open_found(&mut list, num_blocks);
        let mut num_computed = list.num_published * self.block_size;
        match saved.take() {
            Some(saved) if is_restored => {
                num_computed = saved.num_tokens;
                list.epoch = saved.epoch;
                for from in saved.blocks {
                    self.load(from, &mut list);
                }
            }
            Some(saved) => self.discard(saved),
            None => {}
        }
        Some((list, num_computed))
    }

    /// Gives a new list what was found, and the promise of the rest.
    fn open_found(&mut self, list: &mut BlockList, num_blocks: usize) {
        let Some(prefix) = &mut self.prefix else { return self.pool.reserve(list, num_blocks) };
        list.epoch = prefix.epoch();
        // All are held before one is loaded: loading evicts others.
        for &node in &self.found {
            match prefix.place(node) {
                Place::Device(block) => {
                    list.blocks.push(block);
                    if self.pool.hold(block) {
                        prefix.hold(node);
                    }
                }
                Place::Host(_) => prefix.hold(node),
            }
            list.depends_on = list.depends_on.max(prefix.loaded_in(node));
        }
        self.pool.reserve(list, num_blocks - list.blocks.len());
        for index in list.blocks.len()..self.found.len() {
            let node = self.found[index];
            let Some(Place::Host(from)) = self.prefix.as_ref().map(|prefix| prefix.place(node)) else {
                panic!("{node:?} continues one on the host; this is a bug");
            };
            let block = self.load(from, list);
            if let Some(prefix) = &mut self.prefix {
                prefix.move_to_device(node, block, self.next_step);
            }
        }
        list.num_published = self.found.len();
        list.last_published = self.found.last().copied();
    }

    /// Adds a block to a list that the next plan loads from the host.
    fn load(&mut self, from: HostBlockId, list: &mut BlockList) -> BlockId {
        let to = self.take(list);
        self.copies.push(BlockCopy::Load { from, to });
        self.host.give_back(from);
        list.depends_on = self.next_step;
        to
    }

    fn is_held(&self, node: NodeId) -> bool {
        let place = self.prefix.as_ref().map(|prefix| prefix.place(node));
        matches!(place, Some(Place::Device(block)) if self.pool.count(block) > 0)
    }

    /// Takes blocks until `list` has `num_blocks` of them; false, changing nothing, if they cannot be had.
    pub fn grow(&mut self, list: &mut BlockList, num_blocks: usize) -> bool {
        let num_missing = num_blocks.saturating_sub(list.blocks.len());
        let num_unpromised = num_missing.saturating_sub(list.num_reserved);
        if num_unpromised > self.pool.num_available() {
            return false;
        }
        self.pool.reserve(list, num_unpromised);
        for _ in 0..num_missing {
            self.take(list);
        }
        true
    }

    /// Gives back the last blocks of a list, so that `num_blocks` of them are left; they are unpublished. Whether there
    /// were some.
    pub fn shrink(&mut self, list: &mut BlockList, num_blocks: usize) -> bool {
        let has_more = list.blocks.len() > num_blocks;
        for block in list.blocks.drain(num_blocks.min(list.blocks.len())..).rev() {
            self.pool.let_go(block, false);
        }
        has_more
    }

    /// A block out of the list's reservation.
    fn take(&mut self, list: &mut BlockList) -> BlockId {
        if !self.pool.has_free() {
            self.evict();
        }
        self.pool.take(list)
    }

    /// Frees the block that nobody has used for longest. There is one, or nothing could have been promised.
    fn evict(&mut self) {
        let host_block = if self.host_prefixes { self.take_host_block() } else { None };
        let prefix = self.prefix.as_mut().expect("only a cache keeps blocks; this is a bug");
        let node = prefix.oldest_on_device().expect("kept blocks are listed; this is a bug");
        let Place::Device(block) = prefix.place(node) else {
            panic!("{node:?} is in the wrong list; this is a bug");
        };
        match host_block {
            Some(to) => {
                self.copies.push(BlockCopy::Save { from: block, to });
                prefix.move_to_host(node, to);
            }
            // No prefix that could be forgotten is on the host: there is no tier or none for prefixes, or sequences use
            // it all, or what they are about to load does. Nothing there continues this node, which nobody holds.
            None => prefix.remove(node),
        }
        self.pool.release(block);
    }

    /// A free block of the host tier, or that of the prefix there which nobody has used for longest.
    fn take_host_block(&mut self) -> Option<HostBlockId> {
        if let Some(block) = self.host.take() {
            return Some(block);
        }
        let prefix = self.prefix.as_mut()?;
        let node = prefix.oldest_on_host()?;
        let Place::Host(block) = prefix.place(node) else {
            panic!("{node:?} is in the wrong list; this is a bug");
        };
        prefix.remove(node);
        Some(block)
    }

    /// Publishes the full blocks among the first `num_computed` tokens of a list, which are computed: their step is
    /// done. Where the cache has a block of the same contents, the first one stays and the list holds it from now on;
    /// its own goes free, as in `give_back`. Whether that happened.
    pub fn publish(
        &mut self,
        list: &mut BlockList,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        num_computed: usize,
        now: Instant,
    ) -> bool {
        let end = (num_computed / self.block_size).min(chain.max_blocks());
        if list.num_published >= end {
            return false;
        }
        self.expire(now);
        let Some(prefix) = &mut self.prefix else { return false };
        if list.epoch != prefix.epoch() {
            return false;
        }
        let mut is_one_freed = false;
        for index in list.num_published..end {
            let block = list.blocks[index];
            let (node, is_new) = prefix.insert(chain, tokens, index, list.last_published, block, now);
            match prefix.place(node) {
                _ if is_new => {}
                Place::Device(first) => {
                    if self.pool.hold(first) {
                        prefix.hold(node);
                    }
                    is_one_freed |= self.pool.let_go(block, false);
                    list.blocks[index] = first;
                    list.depends_on = list.depends_on.max(prefix.loaded_in(node));
                }
                Place::Host(first) => {
                    prefix.hold(node);
                    prefix.move_to_device(node, block, 0);
                    self.host.give_back(first);
                }
            }
            list.last_published = Some(node);
        }
        list.num_published = end;
        is_one_freed
    }

    /// Ends a list: its reservation lapses, and blocks that no other list holds are kept if they are published, and
    /// else free. They may be handed out at once, though plans in flight may read and write them: see the module `kv`.
    pub fn give_back(&mut self, mut list: BlockList, now: Instant) {
        self.pool.cancel_reservation(&mut list);
        // Last block first: the cache's rule; and the next list gets free ones in the order this one had.
        for block in list.blocks.drain(..).rev() {
            let node = self.prefix.as_ref().and_then(|prefix| prefix.node_in(block));
            let is_unheld = self.pool.let_go(block, node.is_some());
            if let (true, Some(prefix), Some(node)) = (is_unheld, &mut self.prefix, node) {
                prefix.let_go(node, now);
            }
        }
    }

    /// Saves in the host tier what of a list the prefix cache does not keep, prefixes there making way; to be called
    /// just before the list is given back. `None` if there is nothing to save, no room for it, or too much to be copied
    /// already. It is saved as a whole, however much it is.
    pub fn save(&mut self, list: &BlockList, num_tokens: usize) -> Option<Saved> {
        let epoch = self.prefix.as_ref().map(PrefixCache::epoch);
        let first = if epoch == Some(list.epoch) { list.num_published } else { 0 };
        let num_blocks = list.blocks.len() - first;
        let num_prefixes = self.prefix.as_ref().map_or(0, PrefixCache::num_on_host);
        let is_crowded = self.copies.len() >= MAX_COPIES;
        if is_crowded || num_blocks == 0 || num_blocks > self.host.num_free() + num_prefixes {
            return None;
        }
        let mut blocks = Vec::with_capacity(num_blocks);
        for &from in &list.blocks[first..] {
            let to = self.take_host_block().expect("counted just now; this is a bug");
            self.copies.push(BlockCopy::Save { from, to });
            blocks.push(to);
        }
        Some(Saved { first, blocks, num_tokens, step: self.next_step, epoch: list.epoch })
    }

    /// Gives up what was saved.
    pub fn discard(&mut self, saved: Saved) {
        saved.blocks.into_iter().for_each(|block| self.host.give_back(block));
    }

    /// A plan with work is to be submitted: it gets its number and the copies decided up to now. Those made for
    /// sequences that this plan does not compute come early, and never late.
    pub fn submit(&mut self, plan: &mut StepPlan) {
        plan.step = self.next_step;
        plan.copies.append(&mut self.copies);
        self.next_step += 1;
    }

    /// Blocks that would become available if all these lists were given back.
    pub fn num_freed_by<'a>(&mut self, lists: impl Iterator<Item = &'a BlockList> + Clone) -> usize {
        let blocks = || lists.clone().flat_map(|list| &list.blocks);
        let mut num_freed = lists.clone().map(|list| list.num_reserved).sum();
        for block in blocks() {
            let num_holders = &mut self.num_holders[block.0 as usize];
            *num_holders += 1;
            num_freed += usize::from(*num_holders as usize == self.pool.count(*block));
        }
        blocks().for_each(|block| self.num_holders[block.0 as usize] = 0);
        num_freed
    }

    /// The books of the KV cache.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The books of the host tier.
    pub fn host(&self) -> &HostPool {
        &self.host
    }

    /// Panics unless all books agree with each other, with `lists` and with `saved`, which must be all there are.
    pub fn check_integrity<'a>(
        &self,
        lists: impl Iterator<Item = &'a BlockList> + Clone,
        saved: impl Iterator<Item = &'a Saved>,
    ) {
        let kept = self.prefix.iter().flat_map(PrefixCache::unheld_on_device);
        self.pool.check_integrity(lists.clone(), kept);
        let prefixes = self.prefix.iter().flat_map(PrefixCache::host_blocks);
        let saved = saved.flat_map(|saved| saved.blocks.iter().copied());
        self.host.check_integrity(saved.chain(prefixes));
        let Some(prefix) = &self.prefix else { return };
        prefix.check_integrity(|block| self.pool.count(block) > 0);
        for list in lists.filter(|list| list.epoch == prefix.epoch()) {
            let published = list.blocks.iter().take_while(|block| prefix.node_in(**block).is_some()).count();
            assert_eq!(published, list.num_published, "{list:?} is not what the cache has; this is a bug");
            let last = published.checked_sub(1).and_then(|last| prefix.node_in(list.blocks[last]));
            assert_eq!(last, list.last_published, "{list:?} goes on elsewhere; this is a bug");
        }
    }
}
