//! An open checkpoint: one interface for both file formats.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use penstock_types::Dtype;
use serde_json::Value;

use crate::converted::Converted;
use crate::error::{CheckpointError, shown};
use crate::mapped::MappedFile;
use crate::storage::Storage;
use crate::tensor::{Tensor, TensorEntry};
use crate::tokenizer::{AddedToken, SpecialTokens, TokenizerSource};
use penstock_types::GenerationConfig;

/// The file format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// A Hugging Face directory with safetensors weights.
    Safetensors,
    /// A GGUF file of this version.
    Gguf(u32),
    /// A converted model of this version of the format.
    Converted(u32),
}

/// A summary of a checkpoint for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub format: FileFormat,
    pub files: Vec<PathBuf>,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of elements of all tensors.
    pub elements: u64,
    /// Size of all tensors on disk, in bytes.
    pub bytes: u64,
    /// Number of elements by stored type, largest first. Types that cannot be read as weights are left out.
    pub storage: Vec<(String, u64)>,
    /// The method and the parameters of a quantised Hugging Face checkpoint, such as "GPTQ, 4 bits, groups of 128".
    pub quantization: Option<String>,
}

/// A model on disk with checked headers and mapped weights.
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) format: FileFormat,
    pub(crate) files: Vec<MappedFile>,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    pub(crate) quantization: Option<String>,
    pub(crate) config: Value,
    pub(crate) generation: GenerationConfig,
    pub(crate) tokenizer: Option<TokenizerSource>,
    pub(crate) special_tokens: SpecialTokens,
    pub(crate) added_tokens: Vec<AddedToken>,
    pub(crate) chat_templates: BTreeMap<String, String>,
    pub(crate) converted: Option<Converted>,
}

impl Checkpoint {
    /// The opened file or directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration: `config.json`, or the same keys from GGUF metadata. Always an object.
    ///
    /// The rope divisors per frequency of a GGUF file, which represent `llama3` scaling there, are the array
    /// `rope_frequency_factors`, with one number per pair of a head's dimensions.
    pub fn config(&self) -> &Value {
        &self.config
    }

    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The type of most matrices that are not quantised, which they have in memory by default; bfloat16 if all are.
    pub fn dtype(&self) -> Dtype {
        if let Some(conversion) = self.conversion() {
            return conversion.dtype;
        }
        let elements = |dtype| -> usize {
            let matrices = self.tensors.values().filter(|entry| entry.shape.len() > 1);
            matrices.filter(|entry| entry.stored.plain() == Some(dtype)).map(TensorEntry::elements).sum()
        };
        // The last of several that are equal.
        [Dtype::F32, Dtype::F16, Dtype::Bf16]
            .into_iter()
            .max_by_key(|&dtype| elements(dtype))
            .unwrap_or(Dtype::Bf16)
    }

    /// The tensor with this Hugging Face name.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, CheckpointError> {
        let Some((name, entry)) = self.tensors.get_key_value(name) else {
            return Err(CheckpointError::MissingTensor { path: self.path.clone(), name: shown(name) });
        };
        Tensor::new(name, entry, &self.files).map_err(|dtype| {
            let file = self.files[entry.at.file].path();
            CheckpointError::unsupported(file, shown(name), dtype, Storage::SUPPORTED)
        })
    }

    /// Whether a tensor with this name exists.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The source of the vocabulary. The error names the file that would contain it.
    pub fn tokenizer(&self) -> Result<&TokenizerSource, CheckpointError> {
        let missing = match self.format {
            FileFormat::Safetensors => {
                "has no tokenizer.json; AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
            }
            FileFormat::Gguf(_) => "has no tokenizer.ggml.tokens in its metadata",
            FileFormat::Converted(_) => "was converted from a model without a tokenizer",
        };
        self.tokenizer.as_ref().ok_or_else(|| CheckpointError::not_a_model(&self.path, missing))
    }

    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special_tokens
    }

    /// Tokens added outside `tokenizer.json`, ordered by id. Empty for GGUF, whose vocabulary is complete.
    pub fn added_tokens(&self) -> &[AddedToken] {
        &self.added_tokens
    }

    /// The default chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_templates.get("default").map(String::as_str)
    }

    /// All chat templates by name.
    pub fn chat_templates(&self) -> &BTreeMap<String, String> {
        &self.chat_templates
    }

    /// A summary for display.
    pub fn description(&self) -> Description {
        let mut by_storage: BTreeMap<String, u64> = BTreeMap::new();
        let (mut elements, mut bytes) = (0, 0);
        for entry in self.tensors.values() {
            let count = entry.elements() as u64;
            elements += count;
            bytes += entry.stored_bytes() as u64;
            if entry.stored.is_supported() {
                *by_storage.entry(entry.stored.to_string()).or_default() += count;
            }
        }
        let mut storage: Vec<_> = by_storage.into_iter().collect();
        storage.sort_by_key(|(_, elements)| std::cmp::Reverse(*elements));
        Description {
            format: self.format,
            files: self.files.iter().map(|file| file.path().to_owned()).collect(),
            tensors: self.tensors.len(),
            elements,
            bytes,
            storage,
            quantization: self.quantization.clone(),
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.path)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}
