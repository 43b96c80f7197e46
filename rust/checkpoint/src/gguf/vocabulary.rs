//! The vocabulary, special tokens, chat templates and generation defaults in GGUF metadata.

use std::collections::BTreeMap;

use super::metadata::Metadata;
use crate::error::CheckpointError;
use crate::generation::remove_unfitting;
use crate::text_files::MAX_TEMPLATES;
use crate::tokenizer::{GgufVocabulary, SpecialTokens, TokenType};
use penstock_types::GenerationConfig;

/// The texts of tokens that end generation, whether or not a file names them: of a text, a turn, a message, or a call
/// of a tool. These are the texts that llama.cpp knows, so that a model ends where it ends there.
const ENDS: [&str; 22] = [
    "</s>",
    "<eos>",
    "[EOS]",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[e~[",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|tool_response>",
];
/// Tokens for infilling that end generation: after the padding, or with another repository or file, the infilled text
/// is complete. A file names a token by its role, or has one of the texts.
const INFILLING_ENDS: [(&str, &[&str]); 3] = [
    ("fim_pad", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    ("fim_rep", &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    ("fim_sep", &["<|file_sep|>"]),
];

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

/// A vocabulary has a text of [`ENDS`] once. Those of others, which no model has, are left out beyond this number.
const MAX_ENDS: usize = 64;

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
    remove_unfitting(&mut generation, metadata.file());
    let Some(vocabulary) = vocabulary else { return Ok(generation) };
    generation.bos_token_id = vocabulary.bos;
    generation.pad_token_id = vocabulary.pad;

    let named = |role| token_id(metadata, role, vocabulary.tokens.len());
    let mut ends: Vec<u32> = [vocabulary.eos, named("eot")?, named("eom")?].into_iter().flatten().collect();
    ends.extend(known_ends(vocabulary));
    for (role, texts) in INFILLING_ENDS {
        // The token is not needed, so a wrong id is no error.
        ends.extend(named(role).unwrap_or(None).or_else(|| ids_of(vocabulary, texts).next()));
    }
    for id in ends {
        if !generation.eos_token_ids.contains(&id) {
            generation.eos_token_ids.push(id);
        }
    }
    Ok(generation)
}

/// The tokens of the vocabulary with one of these texts.
fn ids_of<'a>(vocabulary: &'a GgufVocabulary, texts: &'a [&str]) -> impl Iterator<Item = u32> + 'a {
    let tokens = vocabulary.tokens.iter().zip(0_u32..);
    tokens.filter(|(text, _)| texts.contains(&text.as_str())).map(|(_, id)| id)
}

/// The tokens of [`ENDS`], except those that do not end generation beside others.
fn known_ends(vocabulary: &GgufVocabulary) -> Vec<u32> {
    let has = |texts: &[&str]| ids_of(vocabulary, texts).next().is_some();
    let has_calls = has(&["<|call|>", "<|calls|>"]);
    // In formats with channels it separates the messages of one answer.
    let is_separator = has_calls && has(&["<|return|>", "<|flush|>"]);
    // With these ends it is a tag of HTML.
    let eos = vocabulary.eos.map(|id| vocabulary.tokens[id as usize].as_str());
    let is_tag = has(&["<|tool_response>"]) || eos == Some("<|plamo:eos|>");
    let excluded = |text: &str| is_separator && text == "<|end|>" || is_tag && text == "</s>";
    let ends = ids_of(vocabulary, &ENDS).filter(|&id| !excluded(&vocabulary.tokens[id as usize]));
    ends.take(MAX_ENDS).collect()
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
        if templates.len() == MAX_TEMPLATES {
            return Err(metadata.malformed(KEY, format!("more than {MAX_TEMPLATES} chat templates")));
        }
        templates.insert(name.to_owned(), template.unwrap_or_default().to_owned());
    }
    Ok(templates)
}
