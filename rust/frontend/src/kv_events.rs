//! KV events in the form that readers take: consecutive blocks of a sequence as one event, and the messages of vLLM.

use penstock_engine::{KvBatch, KvEvent, KvNamespace, KvTier};
use penstock_types::KvEventFormat;

/// The beginning of a salt among the extra keys of a block. Readers take no other text for a salt.
const SALT_PREFIX: &str = "dynamo-cache-salt:";

/// An event of one or more blocks.
#[derive(Debug, PartialEq)]
pub enum BlockEvent<'a> {
    /// Blocks that follow each other. `tokens` has those of all of them.
    Stored {
        hashes: Vec<u64>,
        parent: Option<u64>,
        tokens: &'a [u32],
        tier: KvTier,
        namespace: &'a KvNamespace,
    },
    Removed {
        hashes: Vec<u64>,
        tier: KvTier,
    },
    Cleared,
}

/// The events of a batch, neighbours joined.
pub fn block_events(batch: &KvBatch, block_size: usize) -> Vec<BlockEvent<'_>> {
    let mut events = Vec::new();
    let mut num_tokens = 0;
    for event in &batch.events {
        match (event, events.last_mut()) {
            (KvEvent::Cleared, _) => events.push(BlockEvent::Cleared),
            (KvEvent::Removed { hash, tier }, Some(BlockEvent::Removed { hashes, tier: last }))
                if tier == last =>
            {
                hashes.push(*hash);
            }
            (KvEvent::Removed { hash, tier }, _) => {
                events.push(BlockEvent::Removed { hashes: vec![*hash], tier: *tier });
            }
            (KvEvent::Stored { hash, parent, tier, namespace }, last) => {
                let start = num_tokens;
                num_tokens += block_size;
                if let Some(BlockEvent::Stored { hashes, tokens, tier: last, namespace: other, .. }) = last
                    && (parent.as_ref(), tier, &**namespace) == (hashes.last(), &*last, *other)
                {
                    hashes.push(*hash);
                    *tokens = &batch.tokens[start + block_size - hashes.len() * block_size..num_tokens];
                    continue;
                }
                let tokens = &batch.tokens[start..num_tokens];
                let (parent, tier) = (*parent, *tier);
                events.push(BlockEvent::Stored { hashes: vec![*hash], parent, tokens, tier, namespace });
            }
        }
    }
    events
}

/// The numbers that a message has besides its events.
#[derive(Clone, Copy, Debug)]
pub struct Envelope {
    /// Seconds since 1970.
    pub timestamp: f64,
    pub rank: u32,
    pub format: KvEventFormat,
}

/// The payload of a message with the events of a batch, in MessagePack, as vLLM writes it: `[timestamp, events, rank]`
/// with events as arrays that begin with their names, or the same as maps.
pub fn encode(batch: &KvBatch, block_size: usize, envelope: Envelope) -> Vec<u8> {
    let events = block_events(batch, block_size);
    let mut writer = Writer(Vec::with_capacity(64 + 5 * batch.tokens.len() + 16 * batch.events.len()));
    let form = Form { is_map: envelope.format == KvEventFormat::Map };
    form.begin(&mut writer, 3, None);
    form.key(&mut writer, "ts");
    writer.float(envelope.timestamp);
    form.key(&mut writer, "events");
    writer.array(events.len());
    events.iter().for_each(|event| form.event(&mut writer, event, block_size));
    form.key(&mut writer, "data_parallel_rank");
    writer.uint(envelope.rank.into());
    writer.0
}

#[derive(Clone, Copy)]
struct Form {
    is_map: bool,
}

impl Form {
    /// Begins a structure of `num_fields` fields, with its name if it has one.
    fn begin(self, writer: &mut Writer, num_fields: usize, name: Option<&str>) {
        let num_fields = num_fields + usize::from(name.is_some());
        if self.is_map {
            writer.map(num_fields)
        } else {
            writer.array(num_fields)
        }
        if let Some(name) = name {
            self.key(writer, "type");
            writer.text(name);
        }
    }

    fn key(self, writer: &mut Writer, key: &str) {
        if self.is_map {
            writer.text(key);
        }
    }

    fn event(self, writer: &mut Writer, event: &BlockEvent<'_>, block_size: usize) {
        match event {
            BlockEvent::Stored { hashes, parent, tokens, tier, namespace } => {
                self.begin(writer, 8, Some("BlockStored"));
                self.hashes(writer, hashes);
                self.key(writer, "parent_block_hash");
                writer.option(*parent, Writer::hash);
                self.key(writer, "token_ids");
                writer.array(tokens.len());
                tokens.iter().for_each(|token| writer.uint((*token).into()));
                self.key(writer, "block_size");
                writer.uint(block_size as u64);
                let adapter = namespace.adapter.as_ref();
                self.key(writer, "lora_id");
                writer.option(adapter.map(|(id, _)| id.0), Writer::uint);
                self.medium(writer, *tier);
                self.key(writer, "lora_name");
                writer.option(adapter.map(|(_, name)| &**name), Writer::text);
                self.key(writer, "extra_keys");
                extra_keys(writer, hashes.len(), parent.is_none(), namespace);
            }
            BlockEvent::Removed { hashes, tier } => {
                self.begin(writer, 2, Some("BlockRemoved"));
                self.hashes(writer, hashes);
                self.medium(writer, *tier);
            }
            BlockEvent::Cleared => self.begin(writer, 0, Some("AllBlocksCleared")),
        }
    }

    fn hashes(self, writer: &mut Writer, hashes: &[u64]) {
        self.key(writer, "block_hashes");
        writer.array(hashes.len());
        hashes.iter().for_each(|hash| writer.hash(*hash));
    }

    fn medium(self, writer: &mut Writer, tier: KvTier) {
        self.key(writer, "medium");
        writer.text(match tier {
            KvTier::Device => "GPU",
            KvTier::Host => "CPU",
        });
    }
}

/// A list for each block: the name of the adapter, and the salt in the first block of a sequence.
fn extra_keys(writer: &mut Writer, num_blocks: usize, is_first: bool, namespace: &KvNamespace) {
    let name = namespace.adapter.as_ref().map(|(_, name)| &**name);
    let salt = namespace.salt.as_deref().filter(|_| is_first);
    if name.is_none() && salt.is_none() {
        return writer.nil();
    }
    let salt = salt.map(|salt| match salt.starts_with(SALT_PREFIX) {
        true => salt.to_owned(),
        false => format!("{SALT_PREFIX}{salt}"),
    });
    writer.array(num_blocks);
    for block in 0..num_blocks {
        let keys: Vec<&str> = name.into_iter().chain(salt.as_deref().filter(|_| block == 0)).collect();
        if keys.is_empty() {
            writer.nil();
        } else {
            writer.array(keys.len());
            keys.into_iter().for_each(|key| writer.text(key));
        }
    }
}

/// Writes MessagePack.
struct Writer(Vec<u8>);

impl Writer {
    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    fn float(&mut self, value: f64) {
        self.0.push(0xcb);
        self.0.extend(value.to_be_bytes());
    }

    /// Always in 8 bytes: some readers know no shorter form of a hash.
    fn hash(&mut self, value: u64) {
        self.0.push(0xcf);
        self.0.extend(value.to_be_bytes());
    }

    fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.0.push(value as u8),
            0x80..=0xff => self.0.extend([0xcc, value as u8]),
            0x100..=0xffff => self.tagged(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.tagged(0xce, &(value as u32).to_be_bytes()),
            _ => self.hash(value),
        }
    }

    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend(bytes);
    }

    fn text(&mut self, text: &str) {
        match text.len() {
            length @ 0..=31 => self.0.push(0xa0 | length as u8),
            length @ 32..=255 => self.0.extend([0xd9, length as u8]),
            length @ 256..=0xffff => self.tagged(0xda, &(length as u16).to_be_bytes()),
            length => self.tagged(0xdb, &(length as u32).to_be_bytes()),
        }
        self.0.extend(text.as_bytes());
    }

    fn array(&mut self, length: usize) {
        match length {
            0..=15 => self.0.push(0x90 | length as u8),
            16..=0xffff => self.tagged(0xdc, &(length as u16).to_be_bytes()),
            _ => self.tagged(0xdd, &(length as u32).to_be_bytes()),
        }
    }

    /// Of at most 15 entries.
    fn map(&mut self, length: usize) {
        debug_assert!(length < 16, "a longer map needs another form; this is a bug");
        self.0.push(0x80 | length as u8);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn stored(hash: u64, parent: Option<u64>, tier: KvTier, namespace: &Arc<KvNamespace>) -> KvEvent {
        KvEvent::Stored { hash, parent, tier, namespace: Arc::clone(namespace) }
    }

    #[test]
    fn neighbouring_blocks_are_one_event() {
        let plain = Arc::new(KvNamespace { adapter: None, salt: None });
        let salted = Arc::new(KvNamespace { adapter: None, salt: Some("mine".into()) });
        let (device, host) = (KvTier::Device, KvTier::Host);
        let batch = KvBatch {
            events: vec![
                KvEvent::Cleared,
                stored(1, None, device, &plain),
                stored(2, Some(1), device, &plain),
                stored(3, Some(1), device, &plain),
                stored(4, Some(3), host, &plain),
                stored(5, None, host, &salted),
                KvEvent::Removed { hash: 4, tier: host },
                KvEvent::Removed { hash: 5, tier: host },
                KvEvent::Removed { hash: 2, tier: device },
            ],
            tokens: (0..10).collect(),
        };
        let blocks = |hashes: &[u64], parent, tokens, tier, namespace| BlockEvent::Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens,
            tier,
            namespace,
        };
        let expected = [
            BlockEvent::Cleared,
            blocks(&[1, 2], None, &[0, 1, 2, 3], device, &*plain),
            blocks(&[3], Some(1), &[4, 5], device, &*plain),
            blocks(&[4], Some(3), &[6, 7], host, &*plain),
            blocks(&[5], None, &[8, 9], host, &*salted),
            BlockEvent::Removed { hashes: vec![4, 5], tier: host },
            BlockEvent::Removed { hashes: vec![2], tier: device },
        ];
        assert_eq!(block_events(&batch, 2), expected);
    }
}
