//! A copy of the prefix cache's tree, made from KV events alone, as a router makes it.

use std::collections::{BTreeSet, HashMap};

use penstock_engine::testing::KvFeedReader;
use penstock_engine::{KvBatch, KvEvent, KvNamespace, KvRead, KvTier};

use crate::harness::Harness;

pub struct Mirror {
    reader: KvFeedReader,
    capacity: usize,
    block_size: usize,
    has_ended: bool,
    pub blocks: HashMap<u64, Block>,
}

pub struct Block {
    parent: Option<u64>,
    tokens: Vec<u32>,
    namespace: KvNamespace,
    tiers: BTreeSet<KvTier>,
}

/// The cases that a comparison met.
#[derive(Default)]
pub struct Mirrored {
    pub lost: bool,
    pub host: bool,
    pub salted: bool,
    pub adapters: bool,
}

impl Mirror {
    pub fn new(harness: &mut Harness, capacity: usize) -> Self {
        let block_size = harness.limits.block_size;
        Self {
            reader: harness.read_kv_events(capacity),
            capacity,
            block_size,
            has_ended: false,
            blocks: HashMap::new(),
        }
    }

    /// Reads the events that were handed over. Checks that the blocks are those of the engine.
    #[track_caller]
    pub fn compare(&mut self, harness: &mut Harness) -> Mirrored {
        let lost = self.update() == KvRead::Lost;
        if lost {
            // With the capacity of a real feed, the tree always fits.
            let num_blocks = harness.limits.num_blocks + harness.limits.host_blocks;
            self.reader = harness.read_kv_events(self.capacity.saturating_add(num_blocks + 1));
            assert_ne!(self.update(), KvRead::Lost, "the tree does not fit");
        }
        if !self.has_ended {
            self.check(&harness.core.announced_blocks());
        }
        let blocks = self.blocks.values();
        Mirrored {
            lost,
            host: blocks.clone().any(|block| block.tiers.contains(&KvTier::Host)),
            salted: blocks.clone().any(|block| block.namespace.salt.is_some()),
            adapters: blocks.clone().any(|block| block.namespace.adapter.is_some()),
        }
    }

    fn update(&mut self) -> KvRead<()> {
        let Self { reader, block_size, blocks, .. } = self;
        let read = reader.read(|batch| apply(blocks, batch, *block_size));
        if read == KvRead::Ended {
            self.blocks.clear();
            self.has_ended = true;
        }
        read
    }

    #[track_caller]
    fn check(&self, expected: &[(KvNamespace, Vec<u32>, KvTier)]) {
        let found = self.blocks.iter().flat_map(|(hash, block)| {
            let path = self.path(*hash);
            block.tiers.iter().map(move |tier| sortable(&block.namespace, &path, *tier))
        });
        let expected = expected.iter().map(|(namespace, tokens, tier)| sortable(namespace, tokens, *tier));
        let [found, expected]: [BTreeSet<_>; 2] = [found.collect(), expected.collect()];
        assert_eq!(found, expected, "the mirror differs from the engine");
    }

    fn path(&self, hash: u64) -> Vec<u32> {
        let Block { parent, tokens, .. } = self.blocks.get(&hash).expect("a block has lost its parent");
        let mut path = parent.map_or_else(Vec::new, |parent| self.path(parent));
        path.extend(tokens);
        path
    }

    /// The feed has ended, after the events that are still to be read.
    pub fn check_end(mut self) {
        while self.update() == KvRead::Read(()) {}
        assert!(self.has_ended || self.capacity < usize::MAX, "the feed goes on");
    }
}

type Sortable = (Option<(u64, String)>, Option<String>, Vec<u32>, KvTier);

fn sortable(namespace: &KvNamespace, tokens: &[u32], tier: KvTier) -> Sortable {
    let adapter = namespace.adapter.as_ref().map(|(id, name)| (id.0, name.to_string()));
    (adapter, namespace.salt.as_ref().map(ToString::to_string), tokens.to_vec(), tier)
}

/// Applies events as a strict reader does: a parent is known, and blocks are neither stored nor removed twice.
fn apply(blocks: &mut HashMap<u64, Block>, batch: &KvBatch, block_size: usize) {
    assert!(!batch.events.is_empty(), "an empty batch");
    let mut tokens = batch.tokens.chunks(block_size);
    for event in &batch.events {
        match event {
            KvEvent::Cleared => blocks.clear(),
            KvEvent::Stored { hash, parent, tier, namespace } => {
                assert!(parent.is_none_or(|parent| blocks.contains_key(&parent)), "an unknown parent");
                let tokens = tokens.next().expect("a stored block has tokens").to_vec();
                let new = || Block {
                    parent: *parent,
                    tokens: tokens.clone(),
                    namespace: KvNamespace::clone(namespace),
                    tiers: BTreeSet::new(),
                };
                let block = blocks.entry(*hash).or_insert_with(new);
                assert_eq!((&block.tokens, block.parent), (&tokens, *parent), "two blocks have one hash");
                assert_eq!(&block.namespace, &**namespace, "two namespaces have one hash");
                assert!(block.tiers.insert(*tier), "stored twice");
            }
            KvEvent::Removed { hash, tier } => {
                let block = blocks.get_mut(hash).expect("an unknown block was removed");
                assert!(block.tiers.remove(tier), "removed twice");
                if block.tiers.is_empty() {
                    blocks.remove(hash);
                }
            }
        }
    }
    assert!(tokens.next().is_none(), "tokens of no block");
}
