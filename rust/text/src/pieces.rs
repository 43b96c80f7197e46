//! What each id says, laid out flat so that decoding touches no string of the tokenizer.
//!
//! Built once per tokenizer: a decoder's work that looks at one token only is done here for the whole
//! vocabulary; the rest, which needs to know what came before, is a [`Rule`] that the detokenizer follows.

use std::collections::HashMap;

use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};

use crate::TextError;

/// No vocabulary is near this large; a hostile file must not make the table so.
const LARGEST_ID: u32 = (1 << 22) - 1;

/// How the pieces of successive ids become one text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// Pieces are bytes; characters may be split between them.
    Bytes,
    /// Pieces are text, or bytes in runs that are text only as a whole; `strip` is a character to take off
    /// the beginning of it all, and how often.
    Text { byte_fallback: bool, strip: Option<(char, usize)> },
    /// Pieces are words; what an id adds depends on the one before.
    Spaced,
}

/// What a piece holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    /// One byte of a byte-fallback run.
    Byte,
}

/// One id of a vocabulary, as its file has it.
pub(crate) struct Token {
    pub(crate) spelling: String,
    pub(crate) special: bool,
    /// Whether it is matched verbatim in a text, as all special tokens are.
    pub(crate) added: bool,
}

/// What one id says in the middle of a text.
#[derive(Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) kind: Kind,
    pub(crate) special: bool,
    pub(crate) added: bool,
}

impl<'a> Piece<'a> {
    pub(crate) fn text(&self) -> &'a str {
        std::str::from_utf8(self.bytes).expect("pieces of this rule are text; this is a bug")
    }
}

/// The pieces of a vocabulary, by id.
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// Where each piece ends in `bytes`; it begins where the one before ends.
    ends: Vec<u32>,
    /// None for an id that the vocabulary does not have.
    traits: Vec<Option<Traits>>,
    /// What an id says as the first of a text, where that is something else.
    beginnings: HashMap<u32, Box<str>>,
}

#[derive(Clone, Copy)]
struct Traits {
    kind: Kind,
    special: bool,
    added: bool,
}

impl Pieces {
    /// The pieces of ids `0..=largest`, each of which `token` describes, if the vocabulary has it.
    pub(crate) fn new(
        decoder: Option<&DecoderWrapper>,
        largest: u32,
        token: impl Fn(u32) -> Option<Token>,
    ) -> Result<(Self, Rule), TextError> {
        if largest > LARGEST_ID {
            return Err(TextError::Vocabulary { largest, limit: LARGEST_ID });
        }
        let plan = Plan::new(decoder)?;
        let mut pieces =
            Self { bytes: Vec::new(), ends: Vec::new(), traits: Vec::new(), beginnings: HashMap::new() };
        for id in 0..=largest {
            pieces.traits.push(match token(id) {
                Some(Token { spelling, special, added }) => {
                    if let Some(beginning) = plan.beginning(&spelling) {
                        pieces.beginnings.insert(id, beginning.into());
                    }
                    let kind = plan.append(spelling, &mut pieces.bytes)?;
                    Some(Traits { kind, special, added })
                }
                None => None,
            });
            let end = u32::try_from(pieces.bytes.len());
            pieces.ends.push(end.map_err(|_| TextError::Vocabulary { largest, limit: LARGEST_ID })?);
        }
        Ok((pieces, plan.rule))
    }

    pub(crate) fn get(&self, id: u32) -> Option<Piece<'_>> {
        let index = usize::try_from(id).ok()?;
        let Traits { kind, special, added } = (*self.traits.get(index)?)?;
        let begin = if index == 0 { 0 } else { self.ends[index - 1] };
        let bytes = &self.bytes[begin as usize..self.ends[index] as usize];
        Some(Piece { bytes, kind, special, added })
    }

    /// What `id` says as the first of a text; `piece` is what it says in the middle.
    pub(crate) fn beginning<'a>(&'a self, id: u32, piece: Piece<'a>) -> Piece<'a> {
        match self.beginnings.get(&id) {
            Some(beginning) => Piece { bytes: beginning.as_bytes(), ..piece },
            None => piece,
        }
    }

    /// One more than the largest id.
    pub(crate) fn len(&self) -> usize {
        self.traits.len()
    }
}

/// A decoder, taken apart: what is done to each token alone, and the rule for the rest.
struct Plan<'a> {
    per_token: Vec<&'a DecoderWrapper>,
    /// Says which character stands for the space, and whether for nothing in the first piece of a text.
    metaspace: Option<&'a Metaspace>,
    rule: Rule,
}

impl<'a> Plan<'a> {
    fn new(decoder: Option<&'a DecoderWrapper>) -> Result<Self, TextError> {
        let alone = |rule| Self { per_token: Vec::new(), metaspace: None, rule };
        let Some(decoder) = decoder else { return Ok(alone(Rule::Spaced)) };
        let mut parts = Vec::new();
        flatten(decoder, &mut parts);
        let unsupported = || TextError::Decoder {
            decoder: serde_json::to_string(decoder).unwrap_or_else(|_| format!("{decoder:?}")),
        };
        match parts[..] {
            [DecoderWrapper::ByteLevel(_)] => return Ok(alone(Rule::Bytes)),
            [DecoderWrapper::Metaspace(metaspace)] => {
                let rule = Rule::Text { byte_fallback: false, strip: None };
                return Ok(Self { metaspace: Some(metaspace), ..alone(rule) });
            }
            _ => {}
        }
        let mut parts = parts.into_iter().peekable();
        let mut per_token = Vec::new();
        while let Some(part) = parts.next_if(|part| matches!(part, DecoderWrapper::Replace(_))) {
            per_token.push(part);
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
        Ok(Self { per_token, metaspace: None, rule: Rule::Text { byte_fallback, strip } })
    }

    /// What `spelling` says as the first piece of a text, where that is something else.
    fn beginning(&self, spelling: &str) -> Option<String> {
        let metaspace = self.metaspace.filter(|part| part.get_prepend_scheme() != PrependScheme::Never)?;
        let replacement = metaspace.get_replacement();
        spelling.contains(replacement).then(|| spelling.replace(replacement, ""))
    }

    /// Appends what `spelling` says in the middle of a text.
    fn append(&self, spelling: String, bytes: &mut Vec<u8>) -> Result<Kind, TextError> {
        if self.rule == Rule::Bytes {
            match spelling.chars().map(byte_of).collect::<Option<Vec<u8>>>() {
                Some(spelt) => bytes.extend(spelt),
                // Not in the byte alphabet: an added token, written as it is.
                None => bytes.extend_from_slice(spelling.as_bytes()),
            }
            return Ok(Kind::Text);
        }
        let mut tokens = vec![match self.metaspace {
            Some(metaspace) => spelling.replace(metaspace.get_replacement(), " "),
            None => spelling,
        }];
        for decoder in &self.per_token {
            tokens = decoder
                .decode_chain(tokens)
                .map_err(|error| TextError::Json { reason: error.to_string() })?;
        }
        let text = tokens.concat();
        if matches!(self.rule, Rule::Text { byte_fallback: true, .. })
            && let Some(byte) = fallback_byte(&text)
        {
            bytes.push(byte);
            return Ok(Kind::Byte);
        }
        bytes.extend_from_slice(text.as_bytes());
        Ok(Kind::Text)
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

/// The byte that a character of the byte-level alphabet stands for: printable Latin-1 stands for itself, and
/// the other 68 bytes, in order, are written from U+0100 on.
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

/// The byte of a byte-fallback token, as the `tokenizers` library reads it: `<0x`, two characters that parse
/// as a hexadecimal number, `>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}
