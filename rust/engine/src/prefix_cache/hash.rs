//! The hash of a block: keyed, of its tokens and of the hash of the block before it.
//!
//! ```text
//!   namespace ─▶ hash 0 ──tokens of block 0──▶ hash 1 ──tokens of block 1──▶ hash 2 ...
//! ```
//!
//! SipHash-1-3 with 128 bits of output. Because it is keyed, a client cannot send prompts that all fall into one
//! bucket. It costs a few nanoseconds per token, a thousandth of a step. Tokens are compared on a hit, so a collision
//! is slow, not wrong.

/// The hash after a block, from the key, the hash before the block and the tokens of the block.
pub type HashFunction = fn(key: u128, parent: u128, tokens: &[u32]) -> u128;

/// A hash function with its key.
#[derive(Clone, Copy)]
pub struct BlockHasher {
    key: u128,
    function: HashFunction,
}

impl BlockHasher {
    /// A hasher whose key is secret and random.
    pub fn new(key: u128) -> Self {
        Self { key, function: siphash }
    }

    /// A hasher with another function, for tests with collisions.
    #[cfg(feature = "testing")]
    pub fn with_function(key: u128, function: HashFunction) -> Self {
        Self { key, function }
    }

    pub(super) fn hash(&self, parent: u128, tokens: &[u32]) -> u128 {
        (self.function)(self.key, parent, tokens)
    }
}

/// SipHash-1-3-128 of the message `parent`, `tokens`, all little-endian.
fn siphash(key: u128, parent: u128, tokens: &[u32]) -> u128 {
    let [k0, k1] = [key as u64, (key >> 64) as u64];
    let mut state = SipState([
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ]);
    state.absorb(parent as u64);
    state.absorb((parent >> 64) as u64);
    let (pairs, odd) = tokens.as_chunks::<2>();
    for &[low, high] in pairs {
        state.absorb(u64::from(low) | u64::from(high) << 32);
    }
    let num_bytes = size_of::<u128>() + size_of_val(tokens);
    state.absorb(odd.first().map_or(0, |&token| u64::from(token)) | (num_bytes as u64) << 56);
    let low = state.squeeze(2, 0xee);
    u128::from(low) | u128::from(state.squeeze(1, 0xdd)) << 64
}

struct SipState([u64; 4]);

impl SipState {
    fn absorb(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.0[0] ^= word;
    }

    /// One half of the output; `mark` in `lane` selects it.
    fn squeeze(&mut self, lane: usize, mark: u64) -> u64 {
        self.0[lane] ^= mark;
        (0..3).for_each(|_| self.round());
        self.0.iter().fold(0, |bits, lane| bits ^ lane)
    }

    fn round(&mut self) {
        let [a, b, c, d] = &mut self.0;
        *a = a.wrapping_add(*b);
        *b = b.rotate_left(13) ^ *a;
        *a = a.rotate_left(32);
        *c = c.wrapping_add(*d);
        *d = d.rotate_left(16) ^ *c;
        *a = a.wrapping_add(*d);
        *d = d.rotate_left(21) ^ *a;
        *c = c.wrapping_add(*b);
        *b = b.rotate_left(17) ^ *c;
        *c = c.rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against OpenSSL's SIPHASH with one and three rounds: the key is the bytes 0 to 15, the message counts from 0.
    #[test]
    fn the_hash_is_siphash_1_3_128() {
        let bytes: Vec<u8> = (0..40).collect();
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let first = u128::from_le_bytes(*bytes.first_chunk().unwrap());
        let check = |num_tokens: usize, expected: u128| {
            assert_eq!(siphash(first, first, &words[4..4 + num_tokens]), expected.swap_bytes());
        };
        check(6, 0x5057_2054_3EB9_B413_D50B_3CFA_D9EE_F938);
        check(3, 0x4C3B_A2B3_7B0F_DD8C_FA5E_95C1_89B2_9414);
    }
}
