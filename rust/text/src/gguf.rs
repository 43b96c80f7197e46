//! Construction of a tokenizer from the vocabulary of a GGUF file.
//!
//! Supported are byte-level BPE (`gpt2`), whose merges are in the file, and SentencePiece BPE (`llama`), whose merges
//! follow from the scores. Both become the pipeline of the model's own `tokenizer.json`.

use penstock_checkpoint::{GgufVocabulary, TokenType};
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::normalizers::utils::Sequence as NormalizerSequence;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::template::{SpecialToken, TemplateProcessing};
use tokenizers::{AddedToken, ModelWrapper, NormalizerWrapper};

use crate::error::TextError;
use crate::expression_limits::check_added_bytes;
use crate::model::MAX_AFFIX;
use crate::pipeline::Pipeline;
use crate::splitter::Splitter;
use crate::tokenizer_config::TokenizerConfig;

/// SentencePiece's replacement for a space.
const SPACE: &str = "▁";
/// Maximum length in bytes of a token that text is merged to, where the merges follow from the scores. By default,
/// SentencePiece learns tokens of up to 16 characters.
const MAX_MERGED_TOKEN: usize = 1000;
/// Maximum length of all implied merges, in bytes for each byte of the tokens, and for any vocabulary. Published
/// vocabularies have about two merges for each token.
const MAX_MERGED_BYTES: usize = 16;
const MERGED_BYTES_MARGIN: usize = 1 << 20;

pub(crate) fn build(vocabulary: &GgufVocabulary) -> Result<Pipeline, TextError> {
    let (mut pipeline, add_bos) = match vocabulary.model.as_str() {
        "gpt2" => byte_level(vocabulary)?,
        "llama" => (sentencepiece(vocabulary)?, true),
        other => {
            let reason = format!(
                "{other:?} is not supported; supported are gpt2 (byte-level BPE) and llama (SentencePiece)"
            );
            return Err(TextError::Gguf { field: "model", reason });
        }
    };
    add_tokens(&mut pipeline, vocabulary)?;
    add_template(&mut pipeline, vocabulary, add_bos)?;
    Ok(pipeline)
}

/// The pipeline, and the default for adding BOS.
fn byte_level(vocabulary: &GgufVocabulary) -> Result<(Pipeline, bool), TextError> {
    let config = TokenizerConfig::named(&vocabulary.pre)?;
    if vocabulary.merges.is_empty() {
        return Err(TextError::Gguf {
            field: "merges",
            reason: "missing; a gpt2 vocabulary requires it".into(),
        });
    }
    let vocab = vocab(vocabulary);
    let merges = listed_merges(vocabulary, &vocab)?;
    let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(config.ignore_merges);
    let mut pipeline = with_model(bpe)?;
    if config.nfc {
        let composed = NormalizerWrapper::from(NFC);
        pipeline.with_normalizer(Some(composed)).map_err(|error| gguf_error("pre", &error))?;
    }
    let splitter =
        config.pre_tokenizer().and_then(Splitter::new).map_err(|error| gguf_error("pre", &error))?;
    pipeline.with_pre_tokenizer(Some(splitter)).with_decoder(Some(ByteLevel::default()));
    Ok((pipeline, config.add_bos))
}

fn sentencepiece(vocabulary: &GgufVocabulary) -> Result<Pipeline, TextError> {
    let vocab = vocab(vocabulary);
    let merges = if vocabulary.merges.is_empty() {
        if vocabulary.scores.len() != vocabulary.tokens.len() {
            let reason = format!("{} scores for {} tokens", vocabulary.scores.len(), vocabulary.tokens.len());
            return Err(TextError::Gguf { field: "scores", reason });
        }
        implied_merges(&vocab, &vocabulary.scores)?
    } else {
        listed_merges(vocabulary, &vocab)?
    };
    let mut bpe = BPE::builder().vocab_and_merges(vocab, merges).fuse_unk(true).byte_fallback(true);
    if let Some(unknown) = vocabulary.unk.and_then(|id| token(vocabulary, id)) {
        let bytes = unknown.len();
        if bytes > MAX_AFFIX {
            let reason = format!("a token of {bytes} bytes; the limit is {MAX_AFFIX}");
            return Err(TextError::Gguf { field: "unknown_token_id", reason });
        }
        bpe = bpe.unk_token(unknown.to_owned());
    }
    let mut pipeline = with_model(bpe)?;
    let replace = |from: &str, to: &str| Replace::new(from, to).map_err(|error| gguf_error("tokens", &error));
    // A normaliser, not a pre-tokenizer: it applies to each text between special tokens.
    let mut normalizers: Vec<NormalizerWrapper> = vec![replace(" ", SPACE)?.into()];
    let mut decoders: Vec<DecoderWrapper> =
        vec![replace(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    if vocabulary.add_space_prefix.unwrap_or(true) {
        normalizers.insert(0, Prepend::new(SPACE.to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    pipeline
        .with_normalizer(Some(NormalizerWrapper::from(NormalizerSequence::new(normalizers))))
        .map_err(|error| gguf_error("tokens", &error))?
        .with_decoder(Some(Sequence::new(decoders)));
    Ok(pipeline)
}

/// A pipeline that has only a model.
fn with_model(bpe: BpeBuilder) -> Result<Pipeline, TextError> {
    let model = bpe.build().map_err(|error| gguf_error("tokens", &error))?;
    Ok(Pipeline::new(ModelWrapper::from(model).into()))
}

fn vocab(vocabulary: &GgufVocabulary) -> Vocab {
    vocabulary.tokens.iter().cloned().zip(0..).collect()
}

fn token(vocabulary: &GgufVocabulary, id: u32) -> Option<&str> {
    vocabulary.tokens.get(usize::try_from(id).ok()?).map(String::as_str)
}

fn gguf_error(field: &'static str, error: &impl ToString) -> TextError {
    TextError::Gguf { field, reason: error.to_string() }
}

/// The merges of the file, checked against the vocabulary.
fn listed_merges(vocabulary: &GgufVocabulary, vocab: &Vocab) -> Result<Merges, TextError> {
    let mut joined = String::new();
    let merge = |(index, line): (usize, &String)| {
        let wrong = |reason: &str| TextError::Gguf {
            field: "merges",
            reason: format!("entry {index}, {line:?}, {reason}"),
        };
        let (left, right) =
            line.split_once(' ').ok_or_else(|| wrong("is not two tokens separated by a space"))?;
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        for part in [left, right, joined.as_str()] {
            if !vocab.contains_key(part) {
                return Err(wrong(&format!("requires the token {part:?}, which is not in the vocabulary")));
            }
        }
        Ok((left.to_owned(), right.to_owned()))
    };
    vocabulary.merges.iter().enumerate().map(merge).collect()
}

/// All merges of two tokens into a third, by descending score, then longer left part, then order of ids. This is
/// the order of the reference converter of SentencePiece models.
fn implied_merges(vocab: &Vocab, scores: &[f32]) -> Result<Merges, TextError> {
    struct ImpliedMerge<'a> {
        score: f32,
        left_length: usize,
        right_length: usize,
        left: &'a str,
        right: &'a str,
    }
    let mut tokens: Vec<(&str, u32)> = vocab.iter().map(|(token, &id)| (token.as_str(), id)).collect();
    tokens.sort_unstable_by_key(|&(_, id)| id);
    let limit = tokens.iter().map(|(token, _)| token.len()).sum::<usize>().saturating_mul(MAX_MERGED_BYTES);
    let limit = limit.saturating_add(MERGED_BYTES_MARGIN);
    let mut merged_bytes = 0_usize;
    let (mut merges, mut cuts) = (Vec::new(), Vec::new());
    for (token, id) in tokens {
        if token.len() > MAX_MERGED_TOKEN {
            let bytes = token.len();
            let reason =
                format!("token {id} has {bytes} bytes; the limit is {MAX_MERGED_TOKEN} without merges");
            return Err(TextError::Gguf { field: "tokens", reason });
        }
        let length = token.chars().count();
        for (left_length, (cut, _)) in token.char_indices().enumerate().skip(1) {
            let (left, right) = token.split_at(cut);
            if let (Some(left_id), Some(right_id)) = (vocab.get(left), vocab.get(right)) {
                let (score, right_length) = (scores[id as usize], length - left_length);
                let merge = ImpliedMerge { score, left_length, right_length, left, right };
                cuts.push((left_id, right_id, merge));
            }
        }
        merged_bytes = merged_bytes.saturating_add(cuts.len() * token.len());
        if merged_bytes > limit {
            let reason =
                format!("the merges of the tokens 0 to {id} have {merged_bytes} bytes; the limit is {limit}");
            return Err(TextError::Gguf { field: "tokens", reason });
        }
        cuts.sort_by_key(|&(left, right, _)| (left, right));
        merges.extend(cuts.drain(..).map(|(_, _, merge)| merge));
    }
    merges.sort_by(|a, b| {
        let lengths = |merge: &ImpliedMerge<'_>| (merge.left_length, merge.right_length);
        b.score.total_cmp(&a.score).then_with(|| lengths(b).cmp(&lengths(a)))
    });
    Ok(merges.into_iter().map(|merge| (merge.left.to_owned(), merge.right.to_owned())).collect())
}

/// Adds the tokens that are matched verbatim in text: control tokens, BOS and EOS as special tokens, user-defined
/// tokens as plain ones.
fn add_tokens(pipeline: &mut Pipeline, vocabulary: &GgufVocabulary) -> Result<(), TextError> {
    let named = [vocabulary.bos, vocabulary.eos];
    let added = vocabulary.tokens.iter().zip(0_u32..).filter_map(|(token, id)| {
        let token_type = vocabulary.types.get(id as usize).copied().unwrap_or(TokenType::Normal);
        let special =
            matches!(token_type, TokenType::Control | TokenType::Unknown) || named.contains(&Some(id));
        let verbatim = special || token_type == TokenType::UserDefined;
        verbatim.then(|| AddedToken::from(token.as_str(), special).normalized(false))
    });
    let added: Vec<_> = added.collect();
    let bytes = added.iter().map(|token| token.content.len()).sum();
    check_added_bytes(bytes)
        .map_err(|problem| gguf_error("tokens", &format!("verbatim tokens: {problem}")))?;
    pipeline.add_tokens(added).map_err(|error| gguf_error("tokens", &error))?;
    Ok(())
}

/// Adds BOS and EOS around encoded text if the file, or otherwise the default of its kind, says so.
fn add_template(
    pipeline: &mut Pipeline,
    vocabulary: &GgufVocabulary,
    add_bos: bool,
) -> Result<(), TextError> {
    let added_token =
        |field, asked: Option<bool>, default: bool, id: Option<u32>| match (asked.unwrap_or(default), id) {
            (false, _) => Ok(None),
            (true, Some(id)) => Ok(Some(id)),
            // The default applies only if the token exists.
            (true, None) if asked.is_none() => Ok(None),
            (true, None) => {
                Err(TextError::Gguf { field, reason: "missing, but the file asks to add it".into() })
            }
        };
    let bos = added_token("bos_token_id", vocabulary.add_bos, add_bos, vocabulary.bos)?;
    let eos = added_token("eos_token_id", vocabulary.add_eos, false, vocabulary.eos)?;
    let mut template = vec!["$A"];
    let mut tokens = Vec::new();
    let mut add = |name: &'static str, id: u32| {
        let text = token(vocabulary, id).unwrap_or_default().to_owned();
        tokens.push(
            SpecialToken::new(name.to_owned(), vec![id], vec![text])
                .map_err(|error| gguf_error("tokens", &error))?,
        );
        Ok::<_, TextError>(name)
    };
    if let Some(id) = bos {
        template.insert(0, add("bos", id)?);
    }
    if let Some(id) = eos {
        template.push(add("eos", id)?);
    }
    if tokens.is_empty() {
        return Ok(());
    }
    let processor = TemplateProcessing::builder()
        .try_single(template)
        .map_err(|error| gguf_error("bos_token_id", &error))?
        .special_tokens(tokens)
        .build()
        .map_err(|error| gguf_error("bos_token_id", &error))?;
    pipeline.with_post_processor(Some(processor));
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn merges_of<T: ToString>(tokens: &[T], scores: &[f32]) -> Result<Merges, TextError> {
        let vocab = tokens.iter().map(ToString::to_string).zip(0..).collect();
        implied_merges(&vocab, scores)
    }

    #[test]
    fn implied_merges_are_ordered_by_score_then_left_length() {
        let tokens = ["a", "b", "c", "ab", "bc", "abc", "ca"];
        let merges = merges_of(&tokens, &[0.0, 0.0, 0.0, -3.0, -2.0, -3.0, -1.0]).unwrap();
        let merges: Vec<_> = merges.iter().map(|(left, right)| (left.as_str(), right.as_str())).collect();
        assert_eq!(merges, [("c", "a"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("a", "b")]);
    }

    /// The definition: all pairs of tokens, in the order of three stable sorts.
    fn merges_by_pairs(tokens: &[String], scores: &[f32]) -> Vec<(String, String)> {
        let mut merges = Vec::new();
        for (merged, token) in tokens.iter().enumerate() {
            for left in tokens {
                for right in tokens.iter().filter(|&right| left.clone() + right == *token) {
                    merges.push((merged, left.clone(), right.clone()));
                }
            }
        }
        let length = |text: &str| std::cmp::Reverse(text.chars().count());
        merges.sort_by_key(|(_, left, right)| (length(left), length(right)));
        merges.sort_by(|(a, ..), (b, ..)| scores[*b].total_cmp(&scores[*a]));
        merges.into_iter().map(|(_, left, right)| (left, right)).collect()
    }

    #[test]
    fn implied_merges_are_all_pairs_that_form_a_token() {
        let scored = proptest::collection::hash_map("[abé]{1,5}", (-2_i8..2).prop_map(f32::from), 0..40);
        proptest!(|(scored in scored)| {
            let (tokens, scores): (Vec<_>, Vec<_>) = scored.into_iter().unzip();
            prop_assert_eq!(merges_of(&tokens, &scores).unwrap(), merges_by_pairs(&tokens, &scores));
        });
    }

    #[test]
    fn implied_merges_of_nested_tokens_are_bounded() {
        let nested = |count: usize| -> Vec<String> { (1..=count).map(|length| "a".repeat(length)).collect() };
        assert_eq!(merges_of(&nested(100), &[0.0; 100]).unwrap().len(), 99 * 100 / 2);
        let error = merges_of(&nested(1000), &[0.0; 1000]).unwrap_err().to_string();
        let expected = "GGUF field tokenizer.ggml.tokens: the merges of the tokens 0 to ";
        assert!(error.starts_with(expected) && error.ends_with(" bytes; the limit is 9056576"), "{error}");
    }

    #[test]
    fn long_token_without_listed_merges_is_refused() {
        let tokens = ["a".to_owned(), "a".repeat(1000), "a".repeat(1001)];
        assert_eq!(merges_of(&tokens[..2], &[0.0; 2]).unwrap(), []);
        let error = merges_of(&tokens, &[0.0; 3]).unwrap_err().to_string();
        assert_eq!(
            error,
            "GGUF field tokenizer.ggml.tokens: token 2 has 1001 bytes; the limit is 1000 without merges"
        );
    }
}
