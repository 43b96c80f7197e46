//! What each token of a model says: the table that masks are computed over.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use llguidance::panic_utils;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv, parse_numeric_token};

use crate::GuidanceError;
use crate::library;

/// The longest token that the trie can hold, in bytes. Longer ones are never allowed.
const MAX_TOKEN_BYTES: usize = 1_000;
/// Forced text is tokenised from its beginning, and about this much of it at a time: whoever accepts a token waits for
/// that.
const FORCED_BYTES: usize = 256;
/// What a tokenizer may still change about the tokens before a cut, in bytes.
const UNSETTLED_BYTES: usize = 128;

/// Turns text into ids.
pub type Encode = dyn Fn(&str) -> Vec<u32> + Send + Sync;

/// Text of a token.
#[derive(Clone, Debug)]
pub struct TokenText {
    /// The bytes it stands for; of a special token, its name, such as `<|im_end|>`.
    pub bytes: Vec<u8>,
    /// It is no text, so it may come only where a grammar asks for it by name.
    pub special: bool,
}

/// The table of what each token says, shared by all compilers, grammars and guides of a model.
pub struct Vocabulary {
    environment: TokEnv,
    end_ids: Vec<u32>,
    special: HashMap<String, u32>,
    /// All special ids but the end ids.
    special_ids: Vec<u32>,
    longest_special: usize,
}

impl Vocabulary {
    /// A vocabulary of the tokens by id; ids without a text are never allowed. Where two ids have the same text,
    /// masks allow one of them. `end_ids` end a text and are special whatever their text says. `encode` turns
    /// text into ids as the tokenizer would in the middle of a text: no token added before or after it, no
    /// special token found in it; where its ids say something else, the text is split greedily instead.
    ///
    /// # Errors
    /// [`GuidanceError::Vocabulary`] if there are no end ids, one is not in the table, or the table is too large.
    pub fn new(
        tokens: Vec<Option<TokenText>>,
        end_ids: &[u32],
        encode: Arc<Encode>,
    ) -> Result<Self, GuidanceError> {
        let invalid = |reason: String| GuidanceError::Vocabulary { reason };
        if end_ids.is_empty() {
            return Err(invalid("there are no end ids; a text could never end".into()));
        }
        if let Some(id) = end_ids.iter().find(|&&id| tokens.get(id as usize).is_none()) {
            return Err(invalid(format!("end id {id} is not among the {} tokens", tokens.len())));
        }
        let mut special = HashMap::new();
        let mut special_ids = Vec::new();
        let mut words = Vec::with_capacity(tokens.len());
        for (id, token) in (0u32..).zip(tokens) {
            let ends = end_ids.contains(&id);
            let token = token.unwrap_or_else(|| TokenText { bytes: Vec::new(), special: ends });
            words.push(if token.special || ends {
                if !ends {
                    special_ids.push(id);
                }
                if let Ok(name) = std::str::from_utf8(&token.bytes)
                    && !name.is_empty()
                {
                    special.entry(name.to_owned()).or_insert(id);
                }
                special_word(id, &token.bytes)
            } else {
                text_word(token.bytes)
            });
        }
        let build = || {
            let info = TokRxInfo::new(u32::try_from(words.len())?, end_ids[0]);
            let trie = TokTrie::from(&info, &words).with_eos_tokens(end_ids);
            let longest = words.iter().map(Vec::len).max().unwrap_or(0);
            let window = FORCED_BYTES + UNSETTLED_BYTES + 2 * longest;
            let environment: TokEnv = Arc::new(Environment { trie, encode, window });
            Ok(environment)
        };
        let environment = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(build))
            .map_err(|error| invalid(library::reason(&error)))?;
        let longest_special = special.keys().map(String::len).max().unwrap_or(0);
        Ok(Self { environment, end_ids: end_ids.to_vec(), special, special_ids, longest_special })
    }

    /// Number of ids in the table.
    pub fn num_tokens(&self) -> usize {
        self.environment.tok_trie().vocab_size()
    }

    /// The ids that end a text.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    pub(crate) fn special_ids(&self) -> &[u32] {
        &self.special_ids
    }

    pub(crate) fn environment(&self) -> &TokEnv {
        &self.environment
    }

    /// The special token whose name the text begins with, the longest if there are several, and its id.
    pub(crate) fn special_prefix<'text>(&self, text: &'text str) -> Option<(&'text str, u32)> {
        (1..=self.longest_special.min(text.len()))
            .rev()
            .filter_map(|end| text.get(..end))
            .find_map(|name| self.special.get(name).map(|&id| (name, id)))
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Vocabulary").field("num_tokens", &self.num_tokens()).finish_non_exhaustive()
    }
}

/// The library knows a special token by a byte that no text has, followed by the name. Where the name is too long
/// or there is none, the id takes its place: such a token can be asked for by id alone.
fn special_word(id: u32, name: &[u8]) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    if name.is_empty() || name.len() >= MAX_TOKEN_BYTES {
        word.extend_from_slice(format!("[{id}]").as_bytes());
    } else {
        word.extend_from_slice(name);
    }
    word
}

/// An empty word is never allowed. The byte of special tokens is in no text, but in the vocabularies that have a
/// token for each byte; as a text it would be the beginning of a special token.
fn text_word(bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() > MAX_TOKEN_BYTES || bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
        Vec::new()
    } else {
        bytes
    }
}

/// The library's view of the tokenizer.
struct Environment {
    trie: TokTrie,
    encode: Arc<Encode>,
    /// The most text that is tokenised at once. It begins with the token before the forced text, and the last token
    /// dropped may begin well before what is unsettled: the longest of both leave [`FORCED_BYTES`].
    window: usize,
}

impl Environment {
    /// The ids that the tokenizer gives the text, if they say the text.
    fn encode(&self, text: &str) -> Option<Vec<TokenId>> {
        let ids = (self.encode)(text);
        let mut rest = text.as_bytes();
        for &id in &ids {
            let word = self.trie.token(id);
            rest = rest.strip_prefix(word).filter(|_| !word.is_empty())?;
        }
        rest.is_empty().then_some(ids)
    }
}

impl Environment {
    /// Tokens of text without special ones, and whether they say all of it: of a long text they say its beginning,
    /// of one that the vocabulary has no tokens for as much as it has.
    fn tokenize(&self, bytes: &[u8]) -> (Vec<TokenId>, bool) {
        let head = &bytes[..bytes.len().min(self.window)];
        let text = match std::str::from_utf8(head) {
            Ok(text) => Some(text),
            // A character that the cut went through is among what is dropped below; one that the text begins within is
            // for no tokenizer.
            Err(error) if head.len() < bytes.len() && error.error_len().is_none() => {
                std::str::from_utf8(&head[..error.valid_up_to()]).ok()
            }
            Err(_) => None,
        };
        let (mut ids, mut whole) = match text.and_then(|text| self.encode(text)) {
            Some(ids) => (ids, true),
            None => self.split_greedily(head),
        };
        if head.len() < bytes.len() {
            whole = false;
            let mut dropped = 0;
            while dropped < UNSETTLED_BYTES
                && let Some(id) = ids.pop()
            {
                dropped += self.trie.token_len(id);
            }
        }
        (ids, whole)
    }

    /// Always the longest token that the text begins with, as far as there is one.
    fn split_greedily(&self, mut bytes: &[u8]) -> (Vec<TokenId>, bool) {
        let mut ids = Vec::new();
        while !bytes.is_empty() {
            let (id, length) = self.trie.prefix_token_id(bytes);
            if length == 0 {
                // An empty answer would read as if nothing were forced. The panic ends this sequence alone.
                assert!(
                    !ids.is_empty(),
                    "no token of the vocabulary begins the text {}",
                    bytes[..1].escape_ascii()
                );
                return (ids, false);
            }
            ids.push(id);
            bytes = &bytes[length..];
        }
        (ids, true)
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.tokenize(bytes).0
    }

    /// Tokens of text in which special tokens stand as the marker and `[id]`, and how many of the tokens must not
    /// be split otherwise: those up to the last special one; all, where they say the beginning only.
    fn tokenize_bytes_marker(&self, mut bytes: &[u8]) -> (Vec<TokenId>, usize) {
        let mut ids = Vec::new();
        let mut fixed = 0;
        while let Some(&first) = bytes.first() {
            if first == TokTrie::SPECIAL_TOKEN_MARKER {
                let Some((length, id)) = parse_numeric_token(&bytes[1..]) else { return (ids, fixed) };
                ids.push(id);
                fixed = ids.len();
                bytes = &bytes[1 + length..];
            } else {
                let end = bytes
                    .iter()
                    .position(|&byte| byte == TokTrie::SPECIAL_TOKEN_MARKER)
                    .unwrap_or(bytes.len());
                let (text, whole) = self.tokenize(&bytes[..end]);
                ids.extend(text);
                if !whole {
                    fixed = ids.len();
                    return (ids, fixed);
                }
                bytes = &bytes[end..];
            }
        }
        (ids, fixed)
    }
}
