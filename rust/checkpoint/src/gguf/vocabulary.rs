//! The vocabulary, special tokens, chat templates and generation defaults in GGUF metadata.

use std::collections::BTreeMap;

use super::metadata::Metadata;
use crate::error::CheckpointError;
use crate::tokenizer::{GgufVocabulary, SpecialTokens, TokenType};
use penstock_types::GenerationConfig;

/// Texts of the end-of-turn token of the supported architectures, for files that do not specify it. Without it a chat
/// model would not stop after its answer.
const END_OF_TURN: [&str; 2] = ["<|im_end|>", "<|eot_id|>"];

/// The vocabulary, if the file has one.
pub(super) fn vocabulary(metadata: &Metadata<'_>) -> Result<Option<GgufVocabulary>, CheckpointError> {
    let Some(tokens) = metadata.texts("tokenizer.ggml.tokens")? else { return Ok(None) };
    let Some(model) = metadata.text("tokenizer.ggml.model")? else {
        return Err(metadata.malformed("tokenizer.ggml.model", "missing"));
    };
    let check_count = |key: &str, count: usize| match count == tokens.len() {
        true => Ok(()),
        false => {
            Err(metadata.malformed(key, format!("an array of {count}; there are {} tokens", tokens.len())))
        }
    };
    let scores = metadata.floats("tokenizer.ggml.scores")?;
    if let Some(scores) = &scores {
        check_count("tokenizer.ggml.scores", scores.len())?;
    }
    let types = types(metadata)?;
    if let Some(types) = &types {
        check_count("tokenizer.ggml.token_type", types.len())?;
    }
    Ok(Some(GgufVocabulary {
        model: model.to_owned(),
        pre: metadata.text("tokenizer.ggml.pre")?.unwrap_or("default").to_owned(),
        bos: token_id(metadata, "bos", tokens.len())?,
        eos: token_id(metadata, "eos", tokens.len())?,
        // Some published files have padding and unknown ids beyond their vocabulary. Neither is needed.
        unk: token_id(metadata, "unknown", tokens.len()).unwrap_or(None),
        pad: token_id(metadata, "padding", tokens.len()).unwrap_or(None),
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        merges: metadata.texts("tokenizer.ggml.merges")?.unwrap_or_default(),
        scores: scores.unwrap_or_default(),
        types: types.unwrap_or_default(),
        tokens,
    }))
}

/// The id of a special token, which must be in the vocabulary.
fn token_id(metadata: &Metadata<'_>, role: &str, num_tokens: usize) -> Result<Option<u32>, CheckpointError> {
    let key = format!("tokenizer.ggml.{role}_token_id");
    let Some(id) = metadata.integer(&key)? else { return Ok(None) };
    match u32::try_from(id) {
        Ok(id) if (id as usize) < num_tokens => Ok(Some(id)),
        _ => Err(metadata.malformed(&key, format!("{id}; there are {num_tokens} tokens"))),
    }
}

fn types(metadata: &Metadata<'_>) -> Result<Option<Vec<TokenType>>, CheckpointError> {
    let key = "tokenizer.ggml.token_type";
    let Some(numbers) = metadata.integers(key)? else { return Ok(None) };
    let types = numbers.into_iter().enumerate().map(|(token, number)| match number {
        1 => Ok(TokenType::Normal),
        2 => Ok(TokenType::Unknown),
        3 => Ok(TokenType::Control),
        4 => Ok(TokenType::UserDefined),
        5 => Ok(TokenType::Unused),
        6 => Ok(TokenType::Byte),
        _ => Err(metadata.malformed(key, format!("{number} of token {token}; 1 to 6 are expected"))),
    });
    types.collect::<Result<_, _>>().map(Some)
}

/// The texts of the special tokens.
pub(super) fn special_tokens(vocabulary: &GgufVocabulary) -> SpecialTokens {
    let text = |id: Option<u32>| id.map(|id| vocabulary.tokens[id as usize].clone());
    SpecialTokens {
        bos: text(vocabulary.bos),
        eos: text(vocabulary.eos),
        unk: text(vocabulary.unk),
        pad: text(vocabulary.pad),
    }
}

/// The generation defaults. The tokens for end of text, end of turn and end of message all end generation.
pub(super) fn generation(
    metadata: &Metadata<'_>,
    vocabulary: Option<&GgufVocabulary>,
) -> Result<GenerationConfig, CheckpointError> {
    let number = |key: &str| Ok(metadata.float(key)?.map(|number| number as f32));
    let mut generation = GenerationConfig {
        temperature: number("general.sampling.temp")?,
        top_k: match metadata.integer("general.sampling.top_k")? {
            Some(top_k) => Some(top_k.try_into().map_err(|_| {
                metadata
                    .malformed("general.sampling.top_k", format!("{top_k}; at most {} is expected", u32::MAX))
            })?),
            None => None,
        },
        top_p: number("general.sampling.top_p")?,
        min_p: number("general.sampling.min_p")?,
        repetition_penalty: number("general.sampling.penalty_repeat")?,
        ..GenerationConfig::default()
    };
    let Some(vocabulary) = vocabulary else { return Ok(generation) };
    generation.bos_token_id = vocabulary.bos;
    generation.pad_token_id = vocabulary.pad;

    let named = |role| token_id(metadata, role, vocabulary.tokens.len());
    let end_of_turn = named("eot")?.or_else(|| find_end_of_turn(vocabulary));
    let ends = [vocabulary.eos, end_of_turn, named("eom")?];
    for id in ends.into_iter().flatten() {
        if !generation.eos_token_ids.contains(&id) {
            generation.eos_token_ids.push(id);
        }
    }
    Ok(generation)
}

fn find_end_of_turn(vocabulary: &GgufVocabulary) -> Option<u32> {
    let controls = vocabulary.types.iter().zip(&vocabulary.tokens).enumerate();
    let mut ids = controls.filter(|(_, (kind, text))| {
        matches!(kind, TokenType::Control | TokenType::UserDefined) && END_OF_TURN.contains(&text.as_str())
    });
    ids.next().map(|(id, _)| id as u32)
}

/// The chat templates by name. The one without a name is `default`.
pub(super) fn chat_templates(metadata: &Metadata<'_>) -> Result<BTreeMap<String, String>, CheckpointError> {
    const KEY: &str = "tokenizer.chat_template";
    let mut templates = BTreeMap::new();
    for suffix in metadata.keys_with_prefix(KEY) {
        let name = match suffix.strip_prefix('.') {
            Some(name) => name,
            None if suffix.is_empty() => "default",
            // A different key with the same prefix: the list of names.
            None => continue,
        };
        let template = metadata.text(&format!("{KEY}{suffix}"))?;
        templates.insert(name.to_owned(), template.unwrap_or_default().to_owned());
    }
    Ok(templates)
}
