//! `model.penstock`: an array of a magic string, the version of the format, the checksum of the content, and the
//! content.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use penstock_types::{Dtype, GenerationConfig, WeightFormat};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

use super::NOT_CONVERTED;
use crate::embedding::EmbeddingConfig;
use crate::error::{CheckpointError, shown};
use crate::mapped::MappedFile;
use crate::tokenizer::{AddedToken, SpecialTokens, TokenizerSource};

const MAGIC: &str = "penstock converted model";
/// The version of the format. The layout of packed matrices has a version of its own, in its name.
pub(super) const VERSION: u32 = 1;
/// A tokenizer of the maximum size, and as much as other files of a model have.
const LIMIT: usize = 272 << 20;

/// The parts of a converted model that an ordinary checkpoint does not have.
pub(crate) struct Converted {
    pub(crate) conversion: Conversion,
    /// The version of Penstock that wrote the model.
    pub(super) writer_version: String,
    /// The checksum of each [`super::checksum::CHUNK`] of the weights.
    pub(super) checksums: Vec<u64>,
    /// Whether the weights were compared with the checksums.
    pub(super) is_verified: AtomicBool,
}

/// The packing of the weights of a converted model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conversion {
    /// The backend's name of the layout of packed matrices.
    pub layout: String,
    /// The type of the matrices that are not quantised.
    pub dtype: Dtype,
    /// The requested quantisation, for messages.
    pub quantization: String,
    /// The matrices by [`FusedMatrix::name`].
    pub matrices: BTreeMap<String, FusedMatrix>,
}

/// A matrix of one or more tensors, concatenated by rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FusedMatrix {
    pub columns: usize,
    pub parts: Vec<FusedPart>,
}

/// A tensor of a fused matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FusedPart {
    pub tensor: String,
    pub rows: usize,
    pub format: WeightFormat,
}

impl FusedMatrix {
    /// The name of a matrix, or of a vector, of these tensors.
    pub fn name(tensors: &[String]) -> String {
        tensors.join("+")
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct Graph {
    /// The version of Penstock that wrote the file.
    pub(super) penstock: String,
    pub(super) conversion: Conversion,
    pub(super) weights: Weights,
    pub(super) config: Map<String, Value>,
    pub(super) generation: GenerationConfig,
    pub(super) tokenizer: Option<TokenizerSource>,
    pub(super) special_tokens: SpecialTokens,
    pub(super) added_tokens: Vec<AddedToken>,
    pub(super) chat_templates: BTreeMap<String, String>,
    /// Not in files of earlier versions.
    #[serde(default)]
    pub(super) embedding: EmbeddingConfig,
}

/// The file of the weights.
#[derive(Serialize, Deserialize)]
pub(super) struct Weights {
    pub(super) bytes: u64,
    pub(super) checksums: Vec<u64>,
}

/// The bytes of the file.
pub(super) fn encode(graph: &Graph) -> Vec<u8> {
    let content = rmp_serde::to_vec_named(graph).expect("all values have a msgpack form");
    let file = (MAGIC, VERSION, xxh3_64(&content), serde_bytes::Bytes::new(&content));
    rmp_serde::to_vec(&file).expect("all values have a msgpack form")
}

pub(super) fn read(file: &MappedFile) -> Result<Graph, CheckpointError> {
    let (path, bytes) = (file.path(), file.bytes());
    let malformed = |field: &str, problem: String| CheckpointError::malformed(path, field, problem);
    if bytes.len() > LIMIT {
        return Err(malformed("size", format!("{} bytes; the limit is {LIMIT}", bytes.len())));
    }
    // The version is read first, because the rest of the file depends on it.
    let version = version(bytes).ok_or_else(|| CheckpointError::not_a_model(path, NOT_CONVERTED))?;
    if version != VERSION {
        let advice = format!("{VERSION}; convert the model again with this version of penstock");
        return Err(CheckpointError::unsupported(path, "version", version.to_string(), advice));
    }
    let (_, _, checksum, content): (&str, u32, u64, &serde_bytes::Bytes) =
        rmp_serde::from_slice(bytes).map_err(|error| malformed("content", shown(&error.to_string())))?;
    // The encoding of the outer array is unique, so a different length means bytes after it.
    let expected = rmp_serde::to_vec(&(MAGIC, VERSION, checksum, content)).map_or(0, |bytes| bytes.len());
    if expected != bytes.len() {
        return Err(malformed("size", format!("{} bytes; its content ends at {expected}", bytes.len())));
    }
    if checksum != xxh3_64(content) {
        return Err(malformed("checksum", super::checksum::DAMAGED.to_owned()));
    }
    rmp_serde::from_slice(content).map_err(|error| malformed("content", shown(&error.to_string())))
}

/// The version in an array that starts with [`MAGIC`].
fn version(bytes: &[u8]) -> Option<u32> {
    let magic = rmp_serde::to_vec(MAGIC).ok()?;
    let (_, rest) = bytes.split_first().filter(|(marker, _)| (0x92..=0x9f).contains(*marker))?;
    u32::deserialize(&mut rmp_serde::Deserializer::from_read_ref(rest.strip_prefix(&magic[..])?)).ok()
}
