//! The embedding of a text that a model was trained for, as sentence-transformers or GGUF describe it.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{CheckpointError, shown};
use crate::json::{self, CONFIG_LIMIT, JsonObject, is_inside};

const MODULES: &str = "modules.json";
/// Maximum number of modules; models have two or three.
const MAX_MODULES: usize = 16;
/// The beginning of the fields of a pooling module that select a mode.
const MODE: &str = "pooling_mode_";
/// The names of GGUF's pooling types; 0 is no pooling.
const GGUF_TYPES: [&str; 5] = ["none", "mean", "cls", "last", "rank"];

/// The computation of the embedding of a text from its hidden states. `None` means that the model does not say it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingConfig {
    /// `mean`, `last`, or the name of another mode or of a module that computes something else.
    pub pooling: Option<String>,
    /// Whether embeddings are divided by their length.
    pub normalize: Option<bool>,
}

#[derive(Deserialize)]
struct Module {
    #[serde(rename = "type")]
    class: String,
    path: String,
}

impl EmbeddingConfig {
    /// Reads `modules.json` of a directory and the configuration of the pooling module that it names.
    pub(crate) fn of_directory(path: &Path) -> Result<Self, CheckpointError> {
        let file = path.join(MODULES);
        let Some(bytes) = json::read(&file, CONFIG_LIMIT)? else { return Ok(Self::default()) };
        let modules: Vec<Module> = serde_json::from_slice(&bytes)
            .map_err(|error| json::parse_error(&file, "list of modules", &error))?;
        if modules.len() > MAX_MODULES {
            let field = format!("{} modules", modules.len());
            return Err(CheckpointError::malformed(&file, field, format!("the limit is {MAX_MODULES}")));
        }
        let mut config = Self { pooling: None, normalize: Some(false) };
        for module in &modules {
            match module.class.rsplit('.').next().unwrap_or_default() {
                "Transformer" => {}
                "Normalize" => config.normalize = Some(true),
                "Pooling" if config.pooling.is_none() => {
                    if !is_inside(&module.path) {
                        let field = format!("path {}", shown(&module.path));
                        return Err(CheckpointError::malformed(&file, field, "is outside the directory"));
                    }
                    config.pooling = pooling(&path.join(&module.path).join("config.json"))?;
                }
                other => config.pooling = Some(other.to_owned()),
            }
        }
        Ok(config)
    }

    /// The configuration for the pooling type of a GGUF file.
    pub(crate) fn of_gguf(pooling_type: Option<u64>) -> Self {
        let name = pooling_type.map(|kind| match GGUF_TYPES.get(kind as usize) {
            Some(name) => (*name).to_owned(),
            None => format!("type {kind}"),
        });
        Self { pooling: name.filter(|name| name != GGUF_TYPES[0]), normalize: None }
    }
}

/// The modes of a pooling module, with the names of this crate.
fn pooling(file: &Path) -> Result<Option<String>, CheckpointError> {
    let Some(config) = json::read_object(file)? else { return Ok(None) };
    if let Some(mode) = config.typed("pooling_mode", "a string", serde_json::Value::as_str)? {
        return Ok(Some(known(mode)));
    }
    let names = config.fields.keys().filter_map(|field| field.strip_prefix(MODE));
    let mut modes = Vec::new();
    for name in names {
        if is_set(&config, name)? {
            modes.push(known(name));
        }
    }
    Ok((!modes.is_empty()).then(|| modes.join("+")))
}

fn is_set(config: &JsonObject, name: &str) -> Result<bool, CheckpointError> {
    Ok(config.bool(&format!("{MODE}{name}"))?.unwrap_or(false))
}

fn known(name: &str) -> String {
    match name {
        "mean_tokens" => "mean",
        "lasttoken" => "last",
        "cls_token" => "cls",
        other => other,
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gguf_types_have_names_and_none_is_no_mode() {
        let name = |kind| EmbeddingConfig::of_gguf(kind).pooling;
        assert_eq!([None, Some(0)].map(name), [None, None]);
        let named = ["mean", "cls", "last", "type 9"].map(|name| Some(name.to_owned()));
        assert_eq!([1, 2, 3, 9].map(|kind| name(Some(kind))), named);
    }
}
