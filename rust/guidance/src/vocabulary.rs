//! The text of each token of a model: the table that masks are computed from.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use llguidance::panic_utils;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv, parse_numeric_token};

use crate::GuidanceError;
use crate::library;

/// Maximum length of a token in the trie, in bytes. Longer tokens are never allowed.
const MAX_TOKEN_BYTES: usize = 1_000;
/// Amount of forced text that is tokenised at a time, in bytes. It bounds the time of accepting a token.
const FORCED_BYTES: usize = 256;
/// Distance from the end of a truncated text, in bytes, within which its tokens may differ from those of the whole
/// text.
const UNSETTLED_BYTES: usize = 128;

/// Encodes text as token ids.
pub type Encode = dyn Fn(&str) -> Vec<u32> + Send + Sync;

/// The text of one token.
#[derive(Clone, Debug)]
pub struct TokenText {
    /// The token's bytes; for a special token its name, such as `<|im_end|>`.
    pub bytes: Vec<u8>,
    /// The token is not text. It is allowed only where a grammar names it.
    pub special: bool,
}

/// The texts of all tokens, shared by all grammars and matchers of a model.
pub struct Vocabulary {
    environment: TokEnv,
    end_ids: Vec<u32>,
    special: HashMap<String, u32>,
    /// All special ids except the end ids.
    special_ids: Vec<u32>,
    longest_special: usize,
}

impl Vocabulary {
    /// Creates a vocabulary from the texts of all ids. Ids without a text are never allowed. If several ids have the
    /// same text, masks allow one of them. `end_ids` end a text and are special regardless of their text. `encode`
    /// encodes text as the tokenizer does in the middle of a text: without adding tokens and without recognising
    /// special tokens. If the ids it returns do not spell the text, the text is split greedily instead.
    ///
    /// # Errors
    /// [`GuidanceError::Vocabulary`] if there are no end ids, an end id is not in the table, or the table is too large.
    pub fn new(
        tokens: Vec<Option<TokenText>>,
        end_ids: &[u32],
        encode: Arc<Encode>,
    ) -> Result<Self, GuidanceError> {
        let invalid = |reason: String| GuidanceError::Vocabulary { reason };
        if end_ids.is_empty() {
            return Err(invalid("no end ids: a text could never end".into()));
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

    /// Number of token ids.
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

    /// The longest special token whose name the text starts with, and its id.
    pub(crate) fn special_prefix<'text>(&self, text: &'text str) -> Option<(&'text str, u32)> {
        (1..=self.longest_special.min(text.len()))
            .rev()
            .filter_map(|end| text.get(..end))
            .find_map(|name| self.special.get(name).map(|&id| (name, id)))
    }

    /// The special token of this name, or the only token of the text.
    pub(crate) fn single_token(&self, text: &str) -> Option<u32> {
        self.special.get(text).copied().or_else(|| match self.environment.tokenize_bytes(text.as_bytes())[..]
        {
            [id] if self.environment.tok_trie().token(id) == text.as_bytes() => Some(id),
            _ => None,
        })
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Vocabulary").field("num_tokens", &self.num_tokens()).finish_non_exhaustive()
    }
}

/// The trie entry of a special token: a byte that occurs in no text, followed by the name. If the name is missing or
/// too long, the id replaces it, and grammars can refer to the token only by id.
fn special_word(id: u32, name: &[u8]) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    if name.is_empty() || name.len() >= MAX_TOKEN_BYTES {
        word.extend_from_slice(format!("[{id}]").as_bytes());
    } else {
        word.extend_from_slice(name);
    }
    word
}

/// The trie entry of a text token. An empty entry is never allowed. Text that contains the marker byte of special
/// tokens would be read as the start of one, so such tokens get an empty entry.
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
    /// Maximum length of text that is tokenised at once. The text starts with the token before the forced text, and the
    /// last token dropped at the end may start before the unsettled part; with two tokens of maximum length, at least
    /// [`FORCED_BYTES`] remain.
    window: usize,
}

impl Environment {
    /// The tokenizer's ids of the text, or `None` if they do not spell the text.
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
    /// Tokenises text without special tokens. Also returns whether the tokens spell all of the text: tokens of a long
    /// text spell only its beginning, and so do tokens of a text that the vocabulary cannot spell.
    fn tokenize(&self, bytes: &[u8]) -> (Vec<TokenId>, bool) {
        let head = &bytes[..bytes.len().min(self.window)];
        let text = match std::str::from_utf8(head) {
            Ok(text) => Some(text),
            // A character cut at the end is within the part that is dropped below. Text that starts inside a character
            // cannot be passed to the tokenizer.
            Err(error) if head.len() < bytes.len() && error.error_len().is_none() => {
                std::str::from_utf8(&head[..error.valid_up_to()]).ok()
            }
            Err(_) => None,
        };
        let (mut ids, mut complete) = match text.and_then(|text| self.encode(text)) {
            Some(ids) => (ids, true),
            None => self.split_greedily(head),
        };
        if head.len() < bytes.len() {
            complete = false;
            let mut dropped = 0;
            while dropped < UNSETTLED_BYTES
                && let Some(id) = ids.pop()
            {
                dropped += self.trie.token_len(id);
            }
        }
        (ids, complete)
    }

    /// Splits text into the longest matching tokens, until no token matches.
    fn split_greedily(&self, mut bytes: &[u8]) -> (Vec<TokenId>, bool) {
        let mut ids = Vec::new();
        while !bytes.is_empty() {
            let (id, length) = self.trie.prefix_token_id(bytes);
            if length == 0 {
                // An empty result would mean that nothing is forced. The caught panic ends only this sequence.
                assert!(
                    !ids.is_empty(),
                    "no token of the vocabulary starts with the byte {}",
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

    /// Tokenises text in which special tokens are written as the marker and `[id]`. Also returns the number of leading
    /// tokens whose split is fixed: those up to the last special token, or all if the tokens spell only the beginning.
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
                let (text, complete) = self.tokenize(&bytes[..end]);
                ids.extend(text);
                if !complete {
                    fixed = ids.len();
                    return (ids, fixed);
                }
                bytes = &bytes[end..];
            }
        }
        (ids, fixed)
    }
}
