//! [`KvEvents`]: the option that publishes the changes of the prefix cache.

use crate::enums::KvEventFormat;

/// The publication of KV events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEvents {
    /// The address of the socket that publishes; `None` for events in the process only.
    pub endpoint: Option<String>,
    /// The address of the socket that repeats messages.
    pub replay_endpoint: Option<String>,
    /// The first frame of each message.
    pub topic: String,
    /// The text from which the key of the block hashes is made.
    pub hash_key: String,
    /// The form of messages.
    pub format: KvEventFormat,
    /// The data-parallel rank in each message.
    pub rank: u32,
}

impl KvEvents {
    /// The key of the block hashes: FNV-1a of `hash_key`, with 128 bits.
    pub fn key(&self) -> u128 {
        self.hash_key.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash: u128, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_fnv_1a_of_the_text() {
        let key = |text: &str| KvEvents { hash_key: text.to_owned(), ..KvEvents::default() }.key();
        assert_eq!(key(""), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(key("a"), 0xd228cb696f1a8caf78912b704e4a8964);
    }
}
