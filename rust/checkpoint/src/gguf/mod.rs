//! Reader of GGUF files: translates ggml's names, layout and metadata to Hugging Face's.
//!
//! `header` parses and checks the file; `config`, `names` and `vocabulary` translate it; this module assembles the
//! checkpoint. Nothing borrowed from the file outlives opening.

mod config;
mod header;
mod metadata;
mod names;
mod value;
mod vocabulary;

use std::collections::BTreeMap;
use std::path::Path;

use self::config::GgufConfig;
use self::header::{GgufHeader, TensorInfo};
use self::names::Projection;
use crate::checkpoint::Checkpoint;
use crate::embedding::EmbeddingConfig;
use crate::error::{CheckpointError, shown};
use crate::mapped::MappedFile;
use crate::packed::Location;
use crate::tensor::{RowOrder, StoredType, TensorEntry};
use crate::text_files::{FileFormat, TextFiles};
use crate::tokenizer::{SpecialTokens, TokenizerSource};

/// Opens a `.gguf` file.
pub(crate) fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let file = MappedFile::open(path)?;
    let header = GgufHeader::parse(path, file.bytes())?;
    let metadata = &header.metadata;
    if let Some(parts @ 2..) = metadata.integer("split.count")? {
        let found = format!("{parts}: the file is one part of a split model");
        return Err(metadata.unsupported(
            "split.count",
            found,
            "1; merge the parts with llama-gguf-split --merge",
        ));
    }

    let config = config::read(&header, file.bytes())?;
    Ok(Checkpoint {
        tensors: tensors(path, &header, &config)?,
        quantization: None,
        config: config.json,
        text: text_files(path, &header)?,
        converted: None,
        files: vec![file],
    })
}

/// Reads the text files in a `.gguf` file, which may be a vocabulary without a model.
pub(crate) fn open_text(path: &Path) -> Result<TextFiles, CheckpointError> {
    let file = MappedFile::open(path)?;
    text_files(path, &GgufHeader::parse(path, file.bytes())?)
}

fn text_files(path: &Path, header: &GgufHeader<'_>) -> Result<TextFiles, CheckpointError> {
    let metadata = &header.metadata;
    let vocabulary = vocabulary::vocabulary(metadata)?;
    let pooling_type = match metadata.text("general.architecture")? {
        Some(name) => metadata.integer(&format!("{name}.pooling_type"))?,
        None => None,
    };
    Ok(TextFiles {
        path: path.to_owned(),
        format: FileFormat::Gguf(header.version),
        generation: vocabulary::generation(metadata, vocabulary.as_ref())?,
        special_tokens: vocabulary.as_ref().map_or_else(SpecialTokens::default, vocabulary::special_tokens),
        tokenizer: vocabulary.map(TokenizerSource::Gguf),
        added_tokens: Vec::new(),
        chat_templates: vocabulary::chat_templates(metadata)?,
        embedding: EmbeddingConfig::of_gguf(pooling_type),
    })
}

/// The tensors by Hugging Face name. A tensor without such a name keeps its own.
fn tensors(
    path: &Path,
    header: &GgufHeader<'_>,
    config: &GgufConfig,
) -> Result<BTreeMap<String, TensorEntry>, CheckpointError> {
    let mut tensors = BTreeMap::new();
    for (&name, info) in header.tensors.iter().filter(|(name, _)| **name != config::ROPE_FACTORS) {
        let entry = TensorEntry {
            at: Location { file: 0, range: info.range.clone() },
            shape: info.shape.clone(),
            stored: StoredType::Weights(info.storage),
            order: row_order(path, name, info, config)?,
        };
        let hugging_face = names::hugging_face(name).unwrap_or_else(|| name.to_owned());
        if tensors.insert(hugging_face, entry).is_some() {
            let problem = "the file contains this tensor under ggml's and under Hugging Face's name";
            return Err(CheckpointError::malformed(path, format!("tensor {}", shown(name)), problem));
        }
    }
    Ok(tensors)
}

/// The row order of a tensor. Queries and keys of the llama architecture are stored for rotation of neighbouring pairs.
fn row_order(
    path: &Path,
    name: &str,
    info: &TensorInfo,
    config: &GgufConfig,
) -> Result<RowOrder, CheckpointError> {
    let heads = match names::projection(name).filter(|_| config.architecture == "llama") {
        Some(Projection::Query) => config.num_attention_heads,
        Some(Projection::Key) => config.num_key_value_heads,
        None => return Ok(RowOrder::AsStored),
    };
    let head_dim = config.head_dim;
    let malformed =
        |problem| Err(CheckpointError::malformed(path, format!("tensor {}", shown(name)), problem));
    let rows = info.shape[0];
    if info.shape.len() > 2 || heads.checked_mul(head_dim) != Some(rows) {
        return malformed(format!(
            "shape {:?}; rows of {heads} heads of {head_dim} are expected",
            info.shape
        ));
    }
    if info.shape.len() == 1 && info.storage.block_elements() > 1 {
        return malformed(format!("a bias of type {}; an unquantised type is expected", info.storage));
    }
    Ok(RowOrder::Interleaved { head_dim })
}
