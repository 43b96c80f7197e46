//! KV events in the form that readers take: consecutive blocks of a sequence as one event, and the messages of vLLM.

use std::convert::Infallible;

use penstock_engine::{KvBatch, KvEvent, KvNamespace, KvTier};
use penstock_types::KvEventFormat;
use rmp::encode::{
    ByteBuf, ValueWriteError, write_array_len, write_f64, write_map_len, write_nil, write_str, write_u64,
    write_uint,
};

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
    let capacity = 64 + 5 * batch.tokens.len() + 16 * batch.events.len();
    let out = ByteBuf::from_vec(Vec::with_capacity(capacity));
    let mut message = Message { out, is_map: envelope.format == KvEventFormat::Map };
    let Ok(()) = message.write(&events, block_size, envelope);
    message.out.into_vec()
}

/// Memory is the only limit of what is written.
type Written = Result<(), ValueWriteError<Infallible>>;

/// A message while it is written.
struct Message {
    out: ByteBuf,
    is_map: bool,
}

impl Message {
    fn write(&mut self, events: &[BlockEvent<'_>], block_size: usize, envelope: Envelope) -> Written {
        self.begin(3, None)?;
        self.key("ts")?;
        write_f64(&mut self.out, envelope.timestamp)?;
        self.key("events")?;
        self.array(events.len())?;
        events.iter().try_for_each(|event| self.event(event, block_size))?;
        self.key("data_parallel_rank")?;
        self.uint(envelope.rank.into())
    }

    /// Begins a structure of `num_fields` fields, with its name if it has one.
    fn begin(&mut self, num_fields: u32, name: Option<&str>) -> Written {
        let num_fields = num_fields + u32::from(name.is_some());
        if self.is_map {
            write_map_len(&mut self.out, num_fields)?;
        } else {
            write_array_len(&mut self.out, num_fields)?;
        }
        let Some(name) = name else { return Ok(()) };
        self.key("type")?;
        self.text(name)
    }

    fn key(&mut self, key: &str) -> Written {
        if self.is_map { self.text(key) } else { Ok(()) }
    }

    fn event(&mut self, event: &BlockEvent<'_>, block_size: usize) -> Written {
        match event {
            BlockEvent::Stored { hashes, parent, tokens, tier, namespace } => {
                self.begin(8, Some("BlockStored"))?;
                self.hashes(hashes)?;
                self.key("parent_block_hash")?;
                self.option(*parent, Self::hash)?;
                self.key("token_ids")?;
                self.array(tokens.len())?;
                tokens.iter().try_for_each(|token| self.uint((*token).into()))?;
                self.key("block_size")?;
                self.uint(block_size as u64)?;
                let adapter = namespace.adapter.as_ref();
                self.key("lora_id")?;
                self.option(adapter.map(|(id, _)| id.0), Self::uint)?;
                self.medium(*tier)?;
                self.key("lora_name")?;
                self.option(adapter.map(|(_, name)| &**name), Self::text)?;
                self.key("extra_keys")?;
                self.extra_keys(hashes.len(), parent.is_none(), namespace)
            }
            BlockEvent::Removed { hashes, tier } => {
                self.begin(2, Some("BlockRemoved"))?;
                self.hashes(hashes)?;
                self.medium(*tier)
            }
            BlockEvent::Cleared => self.begin(0, Some("AllBlocksCleared")),
        }
    }

    fn hashes(&mut self, hashes: &[u64]) -> Written {
        self.key("block_hashes")?;
        self.array(hashes.len())?;
        hashes.iter().try_for_each(|hash| self.hash(*hash))
    }

    fn medium(&mut self, tier: KvTier) -> Written {
        self.key("medium")?;
        self.text(match tier {
            KvTier::Device => "GPU",
            KvTier::Host => "CPU",
        })
    }

    /// A list for each block: the name of the adapter, and the salt in the first block of a sequence.
    fn extra_keys(&mut self, num_blocks: usize, is_first: bool, namespace: &KvNamespace) -> Written {
        let name = namespace.adapter.as_ref().map(|(_, name)| &**name);
        let salt = namespace.salt.as_deref().filter(|_| is_first);
        if name.is_none() && salt.is_none() {
            return self.nil();
        }
        let salt = salt.map(|salt| match salt.starts_with(SALT_PREFIX) {
            true => salt.to_owned(),
            false => format!("{SALT_PREFIX}{salt}"),
        });
        self.array(num_blocks)?;
        for block in 0..num_blocks {
            let keys: Vec<&str> = name.into_iter().chain(salt.as_deref().filter(|_| block == 0)).collect();
            if keys.is_empty() {
                self.nil()?;
            } else {
                self.array(keys.len())?;
                keys.into_iter().try_for_each(|key| self.text(key))?;
            }
        }
        Ok(())
    }

    fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T) -> Written) -> Written {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    fn nil(&mut self) -> Written {
        let Ok(()) = write_nil(&mut self.out);
        Ok(())
    }

    /// Always in 8 bytes: some readers know no shorter form of a hash.
    fn hash(&mut self, value: u64) -> Written {
        write_u64(&mut self.out, value)
    }

    fn uint(&mut self, value: u64) -> Written {
        write_uint(&mut self.out, value)?;
        Ok(())
    }

    fn text(&mut self, text: &str) -> Written {
        write_str(&mut self.out, text)
    }

    fn array(&mut self, length: usize) -> Written {
        write_array_len(&mut self.out, length as u32)?;
        Ok(())
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
