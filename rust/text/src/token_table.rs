//! The table of decoded tokens, in one flat allocation.
//!
//! It is built once per tokenizer. Decoder steps that depend on one token only are applied here to the whole
//! vocabulary; steps that depend on previous tokens become a [`DecodeRule`] for the detokenizer.

use std::collections::HashMap;

use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};

use crate::error::TextError;
use crate::expression::{Replacement, TimeLimit};
use crate::normalizer::{MARGIN, MAX_GROWTH, MAX_STEPS, replacement_growth};

/// Maximum token id. Far above any real vocabulary; bounds the table for hostile files.
const MAX_TOKEN_ID: u32 = (1 << 22) - 1;
/// Maximum length of the text of a token, far above the tokens of any real vocabulary. Without a limit, the text of a few
/// ids takes all memory.
const MAX_TOKEN_BYTES: usize = 1024;

/// The rule that joins successive tokens to text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DecodeRule {
    /// Tokens are bytes. A character may be split across tokens.
    Bytes,
    /// Tokens are text, or single bytes whose runs are decoded together. `strip` is a character and the maximum number
    /// of times it is removed from the start of the text.
    Text { byte_fallback: bool, strip: Option<(char, usize)> },
    /// Tokens are words joined with spaces.
    Words,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Text,
    /// One byte of a byte-fallback run.
    Byte,
}

/// A token as it is in the file.
pub(crate) struct VocabularyToken {
    pub(crate) spelling: String,
    pub(crate) special: bool,
    /// Matched verbatim in text. True for all special tokens.
    pub(crate) added: bool,
}

/// A decoded token in the middle of a text.
#[derive(Clone, Copy)]
pub(crate) struct DecodedToken<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) kind: TokenKind,
    pub(crate) special: bool,
    pub(crate) added: bool,
}

impl<'a> DecodedToken<'a> {
    pub(crate) fn text(&self) -> &'a str {
        std::str::from_utf8(self.bytes).expect("tokens of this rule are text; this is a bug")
    }
}

/// The decoded tokens of a vocabulary, by id.
pub(crate) struct TokenTable {
    bytes: Vec<u8>,
    /// The end of each token in `bytes`. It starts at the end of the previous one.
    ends: Vec<u32>,
    /// `None` for ids that are not in the vocabulary.
    attributes: Vec<Option<TokenAttributes>>,
    /// Texts of ids that differ at the start of a text.
    initial_texts: HashMap<u32, Box<str>>,
    /// The length of the longest token in bytes.
    longest: usize,
}

#[derive(Clone, Copy)]
struct TokenAttributes {
    kind: TokenKind,
    special: bool,
    added: bool,
}

impl TokenTable {
    /// Builds the table of the ids `0..=largest`. `token` returns an id's token, if the vocabulary has one.
    pub(crate) fn new(
        decoder: Option<&DecoderWrapper>,
        largest: u32,
        token: impl Fn(u32) -> Option<VocabularyToken>,
    ) -> Result<(Self, DecodeRule), TextError> {
        if largest > MAX_TOKEN_ID {
            return Err(TextError::Vocabulary { largest, limit: MAX_TOKEN_ID });
        }
        let plan = DecodePlan::new(decoder)?;
        let time = TimeLimit::new("decoder");
        let mut table = Self {
            bytes: Vec::new(),
            ends: Vec::new(),
            attributes: Vec::new(),
            initial_texts: HashMap::new(),
            longest: 0,
        };
        for id in 0..=largest {
            let begin = table.bytes.len();
            table.attributes.push(match token(id) {
                Some(VocabularyToken { spelling, special, added }) => {
                    if let Some(text) = plan.initial_text(&spelling) {
                        table.initial_texts.insert(id, text.into());
                    }
                    let kind = plan.append_text(spelling, &time, &mut table.bytes)?;
                    Some(TokenAttributes { kind, special, added })
                }
                None => None,
            });
            let bytes = table.bytes.len() - begin;
            if bytes > MAX_TOKEN_BYTES {
                return Err(TextError::LongToken { id, bytes, limit: MAX_TOKEN_BYTES });
            }
            table.longest = table.longest.max(bytes);
            let end = u32::try_from(table.bytes.len());
            table.ends.push(end.map_err(|_| TextError::Vocabulary { largest, limit: MAX_TOKEN_ID })?);
        }
        Ok((table, plan.rule))
    }

    pub(crate) fn get(&self, id: u32) -> Option<DecodedToken<'_>> {
        let index = usize::try_from(id).ok()?;
        let TokenAttributes { kind, special, added } = (*self.attributes.get(index)?)?;
        let begin = if index == 0 { 0 } else { self.ends[index - 1] };
        let bytes = &self.bytes[begin as usize..self.ends[index] as usize];
        Some(DecodedToken { bytes, kind, special, added })
    }

    /// The token at the start of a text, given the token in the middle of a text.
    pub(crate) fn initial<'a>(&'a self, id: u32, token: DecodedToken<'a>) -> DecodedToken<'a> {
        match self.initial_texts.get(&id) {
            Some(text) => DecodedToken { bytes: text.as_bytes(), ..token },
            None => token,
        }
    }

    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// One more than the largest id.
    pub(crate) fn len(&self) -> usize {
        self.attributes.len()
    }
}

/// A step of a decoder that depends on one token only.
enum TokenStep<'a> {
    Replace(Replacement),
    Other(&'a DecoderWrapper),
}

/// A decoder, divided into steps on single tokens and the rule for joining tokens.
struct DecodePlan<'a> {
    per_token: Vec<TokenStep<'a>>,
    /// Defines the replacement for a space, and whether it is removed from the first token.
    metaspace: Option<&'a Metaspace>,
    rule: DecodeRule,
}

impl<'a> DecodePlan<'a> {
    fn new(decoder: Option<&'a DecoderWrapper>) -> Result<Self, TextError> {
        let joined_by = |rule| Self { per_token: Vec::new(), metaspace: None, rule };
        let Some(decoder) = decoder else { return Ok(joined_by(DecodeRule::Words)) };
        let mut parts = Vec::new();
        flatten(decoder, &mut parts);
        let unsupported = || TextError::Decoder {
            decoder: serde_json::to_string(decoder).unwrap_or_else(|_| format!("{decoder:?}")),
        };
        match parts[..] {
            [DecoderWrapper::ByteLevel(_)] => return Ok(joined_by(DecodeRule::Bytes)),
            [DecoderWrapper::Metaspace(metaspace)] => {
                let rule = DecodeRule::Text { byte_fallback: false, strip: None };
                return Ok(Self { metaspace: Some(metaspace), ..joined_by(rule) });
            }
            _ => {}
        }
        let mut parts = parts.into_iter().peekable();
        let mut per_token = Vec::new();
        let refused = |problem: String| TextError::Json { reason: format!("decoder: {problem}") };
        while let Some(part) = parts.peek().copied()
            && let DecoderWrapper::Replace(replace) = part
        {
            parts.next();
            let step = serde_json::to_value(replace).map_err(|error| refused(error.to_string()))?;
            replacement_growth(&step).map_err(refused)?;
            if per_token.len() == MAX_STEPS {
                return Err(refused(format!("more than {MAX_STEPS} steps")));
            }
            let replacement = Replacement::new(replace).map_err(|error| refused(error.to_string()))?;
            per_token.push(replacement.map_or(TokenStep::Other(part), TokenStep::Replace));
        }
        let byte_fallback = parts.next_if(|part| matches!(part, DecoderWrapper::ByteFallback(_))).is_some();
        let fused = parts.next_if(|part| matches!(part, DecoderWrapper::Fuse(_))).is_some();
        let strip = match parts.next() {
            None => None,
            Some(DecoderWrapper::Strip(strip)) if fused && strip.stop == 0 => {
                Some((strip.content, strip.start))
            }
            Some(_) => return Err(unsupported()),
        };
        if parts.next().is_some() {
            return Err(unsupported());
        }
        Ok(Self { per_token, metaspace: None, rule: DecodeRule::Text { byte_fallback, strip } })
    }

    /// The text of a token at the start of a text, if it differs from that in the middle.
    fn initial_text(&self, spelling: &str) -> Option<String> {
        let metaspace = self.metaspace.filter(|part| part.get_prepend_scheme() != PrependScheme::Never)?;
        let replacement = metaspace.get_replacement();
        spelling.contains(replacement).then(|| spelling.replace(replacement, ""))
    }

    /// Appends the text of a token in the middle of a text. `time` is the limit of the whole vocabulary.
    fn append_text(
        &self,
        spelling: String,
        time: &TimeLimit,
        bytes: &mut Vec<u8>,
    ) -> Result<TokenKind, TextError> {
        if self.rule == DecodeRule::Bytes {
            match spelling.chars().map(byte_of).collect::<Option<Vec<u8>>>() {
                Some(spelt) => bytes.extend(spelt),
                // Outside the byte alphabet: an added token, written verbatim.
                None => bytes.extend_from_slice(spelling.as_bytes()),
            }
            return Ok(TokenKind::Text);
        }
        let longest = spelling.len() * MAX_GROWTH + MARGIN;
        let mut text = match self.metaspace {
            Some(metaspace) => spelling.replace(metaspace.get_replacement(), " "),
            None => spelling,
        };
        for step in &self.per_token {
            let decoded = match step {
                TokenStep::Replace(step) => step.replace(&text, time),
                TokenStep::Other(decoder) => decoder.decode_chain(vec![text]).map(|tokens| tokens.concat()),
            };
            text = decoded.map_err(|error| TextError::Json { reason: error.to_string() })?;
            if text.len() > longest {
                let reason = format!("decoder: it makes a token more than {MAX_GROWTH} times longer");
                return Err(TextError::Json { reason });
            }
        }
        if matches!(self.rule, DecodeRule::Text { byte_fallback: true, .. })
            && let Some(byte) = fallback_byte(&text)
        {
            bytes.push(byte);
            return Ok(TokenKind::Byte);
        }
        bytes.extend_from_slice(text.as_bytes());
        Ok(TokenKind::Text)
    }
}

fn flatten<'a>(decoder: &'a DecoderWrapper, parts: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            sequence.get_decoders().iter().for_each(|inner| flatten(inner, parts));
        }
        part => parts.push(part),
    }
}

/// The byte of a character of the byte-level alphabet. Printable Latin-1 characters are their own bytes; the other 68
/// bytes are numbered in order from U+0100.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The byte of a byte-fallback token such as `<0x0A>`, as the `tokenizers` library parses it.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}
