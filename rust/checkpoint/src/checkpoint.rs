//! The open checkpoint: one surface over both file formats.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use penstock_types::Dtype;
use serde_json::Value;

use crate::error::{CheckpointError, shown};
use crate::generation::Generation;
use crate::mapped::MappedFile;
use crate::storage::Storage;
use crate::tensor::{Entry, Stored, Tensor};
use crate::tokenizer::{AddedToken, SpecialTokens, TokenizerSource};
use crate::{directory, gguf};

/// The file format of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A Hugging Face directory with safetensors weights.
    Safetensors,
    /// A GGUF file of this version.
    Gguf(u32),
}

/// What a checkpoint consists of, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The file format.
    pub format: Format,
    /// The weight files.
    pub files: Vec<PathBuf>,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of elements in all tensors.
    pub elements: u64,
    /// Bytes of all tensors on disk.
    pub bytes: u64,
    /// Elements by stored type, the most frequent first; types that cannot be read as weights are left out.
    pub storage: Vec<(Storage, u64)>,
}

/// A model on disk, its headers checked and its weights mapped.
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) files: Vec<MappedFile>,
    pub(crate) tensors: BTreeMap<String, Entry>,
    pub(crate) config: Value,
    pub(crate) generation: Generation,
    pub(crate) tokenizer: Option<TokenizerSource>,
    pub(crate) special_tokens: SpecialTokens,
    pub(crate) added_tokens: Vec<AddedToken>,
    pub(crate) chat_templates: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a Hugging Face directory (`config.json` and safetensors), a `.gguf` file, or a directory that holds
    /// nothing but one `.gguf` file as a model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let metadata = path.metadata().map_err(|source| CheckpointError::io(path, source))?;
        if metadata.is_dir() {
            return directory::open(path);
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors" | "json" | "bin" | "pt" | "pth") => Err(CheckpointError::not_a_model(
                path,
                "is one file of a model; open the directory that holds it",
            )),
            _ => gguf::open(path),
        }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration: `config.json`, or the same keys made of GGUF metadata. Always an object.
    ///
    /// A GGUF file's per-frequency rope divisors, which stand for `llama3` scaling there, are the array
    /// `rope_frequency_factors`, one number for each pair of a head's dimensions.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Generation defaults.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// The type most weights are stored in; quantised types count as `F32`.
    pub fn dtype(&self) -> Dtype {
        let storage = self.description().storage;
        let elements = |dtype| -> u64 {
            storage.iter().filter(|(storage, _)| storage.dtype() == dtype).map(|(_, elements)| elements).sum()
        };
        let most = [Dtype::F16, Dtype::Bf16, Dtype::F32].into_iter().max_by_key(|&dtype| elements(dtype));
        most.unwrap_or(Dtype::F32)
    }

    /// The tensor of this Hugging Face name.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, CheckpointError> {
        let Some((name, entry)) = self.tensors.get_key_value(name) else {
            return Err(CheckpointError::MissingTensor { path: self.path.clone(), name: shown(name) });
        };
        let file = &self.files[entry.file];
        match entry.stored {
            Stored::Weights(storage) => Ok(Tensor::new(name, entry, storage, file)),
            Stored::Other(dtype) => {
                Err(CheckpointError::unsupported(file.path(), shown(name), dtype, Storage::SUPPORTED))
            }
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Where the vocabulary comes from; an error names the file that would hold it.
    pub fn tokenizer(&self) -> Result<&TokenizerSource, CheckpointError> {
        let missing = match self.format {
            Format::Safetensors => {
                "has no tokenizer.json; AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
            }
            Format::Gguf(_) => "has no tokenizer.ggml.tokens in its metadata",
        };
        self.tokenizer.as_ref().ok_or_else(|| CheckpointError::not_a_model(&self.path, missing))
    }

    /// Texts of the special tokens.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special_tokens
    }

    /// Tokens added outside `tokenizer.json`, by id; empty for GGUF, whose vocabulary is complete.
    pub fn added_tokens(&self) -> &[AddedToken] {
        &self.added_tokens
    }

    /// The chat template that is used when none is asked for by name.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_templates.get("default").map(String::as_str)
    }

    /// All chat templates by name.
    pub fn chat_templates(&self) -> &BTreeMap<String, String> {
        &self.chat_templates
    }

    /// What the checkpoint consists of.
    pub fn description(&self) -> Description {
        let mut by_storage: BTreeMap<Storage, u64> = BTreeMap::new();
        let (mut elements, mut bytes) = (0, 0);
        for entry in self.tensors.values() {
            let count = entry.shape.iter().product::<usize>() as u64;
            elements += count;
            bytes += entry.range.len() as u64;
            if let Stored::Weights(storage) = entry.stored {
                *by_storage.entry(storage).or_default() += count;
            }
        }
        let mut storage: Vec<_> = by_storage.into_iter().collect();
        storage.sort_by_key(|&(_, elements)| std::cmp::Reverse(elements));
        Description {
            format: self.format,
            files: self.files.iter().map(|file| file.path().to_owned()).collect(),
            tensors: self.tensors.len(),
            elements,
            bytes,
            storage,
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
