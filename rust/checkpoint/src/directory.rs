//! Reader of Hugging Face model directories.
//!
//! `config.json` and safetensors weights are required. Tokenizer and template files are optional: whether they are
//! needed depends on the caller.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::embedding::EmbeddingConfig;
use crate::error::{CheckpointError, shown};
use crate::generation::remove_unfitting;
use crate::json::{self, JsonObject, is_inside};
use crate::mapped::MappedFile;
use crate::safetensors::{self, HeaderBytes};
use crate::tensor::TensorEntry;
use crate::text_files::{FileFormat, MAX_TEMPLATES, TextFiles};
use crate::tokenizer::{AddedToken, SpecialTokens, TokenizerSource};
use crate::{converted, gguf, quantization};
use penstock_types::GenerationConfig;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const TOKENIZER_LIMIT: u64 = 256 << 20;
const INDEX_LIMIT: u64 = 32 << 20;
/// Maximum number of shards: each is a mapping, of which a process has about 65,000.
const MAX_SHARDS: usize = 4096;

/// Opens a directory: a converted model, a Hugging Face directory, or its only `.gguf` file if it has no `config.json`.
pub(crate) fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    if converted::is_converted(path) {
        return converted::open(path);
    }
    let Some(mut config) = json::read_object(&path.join(CONFIG))? else {
        return gguf::open(&only_gguf(path, CONFIG)?);
    };
    let (files, tensors) = weights(path)?;
    let (tensors, quantization) = quantization::apply(path, &mut config, &files, with_base_prefix(tensors))?;
    Ok(Checkpoint {
        text: text_files(path, &config)?,
        files,
        tensors,
        quantization,
        config: Value::Object(config.fields),
        converted: None,
    })
}

/// Reads the text files of a directory that [`open`] opens, or of one with a `tokenizer.json`.
pub(crate) fn open_text(path: &Path) -> Result<TextFiles, CheckpointError> {
    if converted::is_converted(path) {
        return converted::open_text(path);
    }
    match json::read_object(&path.join(CONFIG))? {
        Some(config) => text_files(path, &config),
        None if path.join(TOKENIZER).exists() => text_files(path, &JsonObject::empty(path.join(CONFIG))),
        None => gguf::open_text(&only_gguf(path, TOKENIZER)?),
    }
}

/// Reads a `tokenizer.json` alone.
pub(crate) fn open_tokenizer(path: &Path) -> Result<TextFiles, CheckpointError> {
    Ok(TextFiles {
        path: path.to_owned(),
        format: FileFormat::Safetensors,
        generation: GenerationConfig::default(),
        tokenizer: json::read(path, TOKENIZER_LIMIT)?.map(TokenizerSource::Json),
        special_tokens: SpecialTokens::default(),
        added_tokens: Vec::new(),
        chat_templates: BTreeMap::new(),
        embedding: EmbeddingConfig::default(),
    })
}

fn text_files(path: &Path, config: &JsonObject) -> Result<TextFiles, CheckpointError> {
    let empty = |name: &str| JsonObject::empty(path.join(name));
    let object = |name: &str| Ok(json::read_object(&path.join(name))?.unwrap_or_else(|| empty(name)));
    let tokenizer_config = object("tokenizer_config.json")?;
    let special_tokens = special_tokens(&tokenizer_config, &object("special_tokens_map.json")?)?;
    let added_tokens = added_tokens(&tokenizer_config, &object("added_tokens.json")?)?;
    let chat_templates = chat_templates(path, &tokenizer_config)?;
    let tokenizer = json::read(&path.join(TOKENIZER), TOKENIZER_LIMIT)?;
    let end_of_text = || end_of_text(&special_tokens, &added_tokens, tokenizer.as_deref());
    let generation = generation(&object("generation_config.json")?, config, end_of_text)?;
    let tokenizer = tokenizer.map(TokenizerSource::Json);

    Ok(TextFiles {
        path: path.to_owned(),
        format: FileFormat::Safetensors,
        generation,
        tokenizer,
        special_tokens,
        added_tokens,
        chat_templates,
        embedding: EmbeddingConfig::of_directory(path)?,
    })
}

/// The only `.gguf` file of a directory that has no file `missing`.
fn only_gguf(path: &Path, missing: &str) -> Result<PathBuf, CheckpointError> {
    let ggufs = names_ending(path, &[".gguf"])?;
    match ggufs.as_slice() {
        [one] => Ok(path.join(one)),
        [] => {
            let reason = format!("contains neither a {missing} nor a .gguf file");
            Err(CheckpointError::not_a_model(path, reason))
        }
        several => {
            let reason = format!("contains several .gguf files; open one of them: {}", list_names(several));
            Err(CheckpointError::not_a_model(path, reason))
        }
    }
}

/// The weight files and their tensors: a single file, or the shards listed in the index.
fn weights(path: &Path) -> Result<(Vec<MappedFile>, BTreeMap<String, TensorEntry>), CheckpointError> {
    let single = path.join(SINGLE);
    if single.exists() {
        let file = MappedFile::open(&single)?;
        let tensors = safetensors::tensors(&file, 0, &mut HeaderBytes::default())?;
        return Ok((vec![file], tensors));
    }
    let index_path = path.join(INDEX);
    let Some(index) = json::read(&index_path, INDEX_LIMIT)? else {
        return Err(CheckpointError::not_a_model(path, missing_weights_reason(path)?));
    };
    let ShardIndex { weight_map } =
        serde_json::from_slice(&index).map_err(|error| json::parse_error(&index_path, "index", &error))?;

    let shards: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
    if shards.len() > MAX_SHARDS {
        let problem = format!("{} shards; the limit is {MAX_SHARDS}", shards.len());
        return Err(CheckpointError::malformed(&index_path, "weight_map", problem));
    }
    let (mut files, mut header_bytes) = (Vec::new(), HeaderBytes::default());
    let mut shard_tensors = BTreeMap::new();
    for shard in shards {
        let malformed = |problem: &str| {
            let field = format!("weight_map, shard {}", shown(shard));
            Err(CheckpointError::malformed(&index_path, field, problem))
        };
        if !is_inside(shard) {
            return malformed("is outside the model's directory");
        }
        if !path.join(shard).exists() {
            return malformed("missing");
        }
        let file = MappedFile::open(&path.join(shard))?;
        shard_tensors.insert(shard, safetensors::tensors(&file, files.len(), &mut header_bytes)?);
        files.push(file);
    }

    let mut tensors = BTreeMap::new();
    for (name, shard) in &weight_map {
        // All shards of the map have been opened above.
        let Some(entry) = shard_tensors.get_mut(shard.as_str()).and_then(|shard| shard.remove(name)) else {
            let field = format!("weight_map, {}", shown(name));
            let problem = format!("the shard {} does not contain this tensor", shown(shard));
            return Err(CheckpointError::malformed(&index_path, field, problem));
        };
        tensors.insert(name.clone(), entry);
    }
    // The rest are tensors that the index does not list, or lists in another shard.
    let mut all: BTreeMap<_, _> = shard_tensors.into_values().flatten().collect();
    all.append(&mut tensors);
    Ok((files, all))
}

/// The prefix of the model without its head in the names of a causal language model.
const BASE: &str = "model.";
/// The beginnings of the names of that model, as `AutoModel` writes them.
const BASE_PARTS: [&str; 3] = ["embed_tokens.", "layers.", "norm."];

/// The tensors by their names in a causal language model.
fn with_base_prefix(tensors: BTreeMap<String, TensorEntry>) -> BTreeMap<String, TensorEntry> {
    let (base, mut others): (BTreeMap<_, _>, BTreeMap<_, _>) =
        tensors.into_iter().partition(|(name, _)| BASE_PARTS.iter().any(|part| name.starts_with(part)));
    for (name, entry) in base {
        others.entry(format!("{BASE}{name}")).or_insert(entry);
    }
    others
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

fn missing_weights_reason(path: &Path) -> Result<String, CheckpointError> {
    let missing = format!("contains neither {SINGLE} nor {INDEX}");
    let ggufs = names_ending(path, &[".gguf"])?;
    if !ggufs.is_empty() {
        return Ok(format!("{missing}; to use GGUF weights, open the file: {}", list_names(&ggufs)));
    }
    let pickled = names_ending(path, &[".bin", ".pt", ".pth"])?;
    if !pickled.is_empty() {
        return Ok(format!(
            "{missing}, only {}: pickled weights can execute code and are not supported; convert them with \
             AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers",
            list_names(&pickled)
        ));
    }
    let others = names_ending(path, &[".safetensors"])?;
    if !others.is_empty() {
        return Ok(format!("{missing}, only {}", list_names(&others)));
    }
    Ok(missing)
}

/// Sorted names of the directory's files with one of these endings.
fn names_ending(path: &Path, endings: &[&str]) -> Result<Vec<String>, CheckpointError> {
    let io = |source| CheckpointError::io(path, source);
    let mut names = Vec::new();
    for entry in path.read_dir().map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if endings.iter().any(|ending| name.ends_with(ending)) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn list_names(names: &[String]) -> String {
    const MAX_NAMES: usize = 8;
    let mut text = names.iter().take(MAX_NAMES).map(|name| shown(name)).collect::<Vec<_>>().join(", ");
    if names.len() > MAX_NAMES {
        text.push_str(&format!(" and {} more", names.len() - MAX_NAMES));
    }
    text
}

/// The generation defaults of `generation_config.json`, and token ids also of `config.json`. The end tokens of the
/// former are complete; to those of the latter `end_of_text` of the tokenizer is added.
fn generation(
    file: &JsonObject,
    config: &JsonObject,
    end_of_text: impl FnOnce() -> Option<u32>,
) -> Result<GenerationConfig, CheckpointError> {
    let eos_token_ids = match fitting(file.token_ids("eos_token_id")) {
        Some(ids) => ids,
        None => {
            let mut ids = config.token_ids("eos_token_id")?.unwrap_or_default();
            let added = end_of_text().filter(|id| !ids.contains(id));
            ids.extend(added);
            ids
        }
    };
    let first = |field| {
        let ids = match fitting(file.token_ids(field)) {
            None => config.token_ids(field)?,
            ids => ids,
        };
        Ok::<_, CheckpointError>(ids.and_then(|ids| ids.first().copied()))
    };
    let mut generation = GenerationConfig {
        eos_token_ids,
        bos_token_id: first("bos_token_id")?,
        pad_token_id: first("pad_token_id")?,
        do_sample: fitting(file.bool("do_sample")),
        temperature: fitting(file.f32("temperature")),
        top_k: fitting(file.u32("top_k")),
        top_p: fitting(file.f32("top_p")),
        min_p: fitting(file.f32("min_p")),
        typical_p: fitting(file.f32("typical_p")),
        epsilon_cutoff: fitting(file.f32("epsilon_cutoff")),
        repetition_penalty: fitting(file.f32("repetition_penalty")),
        no_repeat_ngram_size: fitting(file.u32("no_repeat_ngram_size")),
        max_length: fitting(file.u32("max_length")),
        max_new_tokens: fitting(file.u32("max_new_tokens")),
    };
    remove_unfitting(&mut generation, &file.path);
    Ok(generation)
}

/// A generation default; none, with a warning, if its type does not fit.
fn fitting<T>(value: Result<Option<T>, CheckpointError>) -> Option<T> {
    value.unwrap_or_else(|error| {
        log::warn!("{error}; the value is ignored");
        None
    })
}

/// The id of the tokenizer's end-of-text token: an added token, of the configuration or of `tokenizer.json`, or one of
/// the vocabulary.
fn end_of_text(special: &SpecialTokens, added: &[AddedToken], tokenizer: Option<&[u8]>) -> Option<u32> {
    #[derive(serde::Deserialize)]
    struct Tokens {
        #[serde(default)]
        added_tokens: Vec<Token>,
    }
    #[derive(serde::Deserialize)]
    struct Vocabulary {
        model: Model,
    }
    #[derive(serde::Deserialize)]
    struct Model {
        /// An object of ids by token, or a list of tokens with scores.
        #[serde(default)]
        vocab: serde_json::Value,
    }
    #[derive(serde::Deserialize)]
    struct Token {
        id: u32,
        content: String,
    }
    let text = special.eos.as_ref()?;
    if let Some(token) = added.iter().find(|token| token.content == *text) {
        return Some(token.id);
    }
    // If the file is not valid, the error is that of the tokenizer.
    let Tokens { added_tokens } = serde_json::from_slice(tokenizer?).ok()?;
    if let Some(token) = added_tokens.into_iter().find(|token| token.content == *text) {
        return Some(token.id);
    }
    // The vocabulary is large, and rarely needed.
    let Vocabulary { model: Model { vocab } } = serde_json::from_slice(tokenizer?).ok()?;
    let id = match vocab {
        serde_json::Value::Object(ids) => ids.get(text)?.as_u64()?,
        serde_json::Value::Array(tokens) => tokens.iter().position(|token| token[0] == **text)? as u64,
        _ => return None,
    };
    id.try_into().ok()
}

/// The text of a token: a string, or the `content` of an object.
fn token_text(object: &JsonObject, field: &str) -> Result<Option<String>, CheckpointError> {
    object.typed(field, "a token, as a string or an object with content", |value| {
        value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
    })
}

fn special_tokens(config: &JsonObject, map: &JsonObject) -> Result<SpecialTokens, CheckpointError> {
    let text = |field| match token_text(config, field)? {
        None => token_text(map, field),
        text => Ok(text),
    };
    Ok(SpecialTokens {
        bos: text("bos_token")?,
        eos: text("eos_token")?,
        unk: text("unk_token")?,
        pad: text("pad_token")?,
    })
}

/// The tokens of `added_tokens_decoder`, and those that are only in the older `added_tokens.json`.
fn added_tokens(config: &JsonObject, older: &JsonObject) -> Result<Vec<AddedToken>, CheckpointError> {
    let mut tokens = BTreeMap::new();
    let empty = serde_json::Map::new();
    let decoder = config.typed("added_tokens_decoder", "an object", Value::as_object)?.unwrap_or(&empty);
    for (id, value) in decoder {
        let field = format!("added_tokens_decoder.{}", shown(id));
        let malformed = |problem: &str| CheckpointError::malformed(&config.path, &field, problem);
        let id: u32 = id.parse().map_err(|_| malformed("the key is not a token id"))?;
        let content =
            value.get("content").and_then(Value::as_str).ok_or_else(|| malformed("has no content"))?;
        let flag = |name: &str| value.get(name).and_then(Value::as_bool);
        let special = flag("special").unwrap_or(false);
        let token = AddedToken {
            id,
            content: content.to_owned(),
            special,
            lstrip: flag("lstrip").unwrap_or(false),
            rstrip: flag("rstrip").unwrap_or(false),
            single_word: flag("single_word").unwrap_or(false),
            normalized: flag("normalized").unwrap_or(!special),
        };
        tokens.insert(id, token);
    }
    for content in older.fields.keys() {
        let Some(id) = older.u32(content)? else { continue };
        tokens.entry(id).or_insert_with(|| AddedToken {
            id,
            content: content.clone(),
            special: false,
            lstrip: false,
            rstrip: false,
            single_word: false,
            normalized: true,
        });
    }
    Ok(tokens.into_values().collect())
}

/// The chat templates of a directory by name. `chat_template.jinja` and the files of `additional_chat_templates` take
/// precedence over `tokenizer_config.json`, which takes precedence over `chat_template.json`.
fn chat_templates(path: &Path, config: &JsonObject) -> Result<BTreeMap<String, String>, CheckpointError> {
    const SUFFIX: &str = ".jinja";
    let mut templates = match json::read_object(&path.join("chat_template.json"))? {
        Some(older) => templates_of(&older)?,
        None => BTreeMap::new(),
    };
    templates.extend(templates_of(config)?);
    if let Some(text) = json::read_text(&path.join("chat_template.jinja"), json::CONFIG_LIMIT)? {
        templates.insert("default".to_owned(), text);
    }
    let folder = path.join("additional_chat_templates");
    let files = if folder.is_dir() { names_ending(&folder, &[SUFFIX])? } else { Vec::new() };
    if files.len() > MAX_TEMPLATES {
        let problem = format!("{} chat templates; the limit is {MAX_TEMPLATES}", files.len());
        return Err(CheckpointError::malformed(&folder, "size", problem));
    }
    for file in files {
        let name = file.strip_suffix(SUFFIX).unwrap_or(&file).to_owned();
        if let Some(text) = json::read_text(&folder.join(&file), json::CONFIG_LIMIT)? {
            templates.insert(name, text);
        }
    }
    Ok(templates)
}

/// The templates of one file: a string, a list of named templates, or an object of them.
fn templates_of(config: &JsonObject) -> Result<BTreeMap<String, String>, CheckpointError> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let named_template = |value: &Value| Some((text(value.get("name")?)?, text(value.get("template")?)?));
    let expected = "a string, or a list of objects with name and template, or an object of strings";
    let templates = config.typed("chat_template", expected, |value| match value {
        Value::String(text) => Some(BTreeMap::from([("default".to_owned(), text.clone())])),
        Value::Array(list) => list.iter().map(named_template).collect(),
        Value::Object(named) => {
            named.iter().map(|(name, value)| Some((name.clone(), text(value)?))).collect()
        }
        _ => None,
    })?;
    Ok(templates.unwrap_or_default())
}
