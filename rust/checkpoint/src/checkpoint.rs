//! An open checkpoint: one interface for both file formats.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use penstock_types::Dtype;
use serde_json::Value;

use crate::converted::Converted;
use crate::error::{CheckpointError, shown};
use crate::mapped::MappedFile;
use crate::storage::Storage;
use crate::tensor::{Tensor, TensorEntry};
use crate::text_files::{FileFormat, TextFiles};

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
    /// The method and the parameters of a quantised Hugging Face checkpoint, such as "GPTQ, 4 bits, groups of 128", or
    /// the quantised types of a GGUF file, such as "Q4_K, Q6_K", largest first.
    pub quantization: Option<String>,
}

/// A model on disk with checked headers and mapped weights.
pub struct Checkpoint {
    pub(crate) text: TextFiles,
    pub(crate) files: Vec<MappedFile>,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    pub(crate) quantization: Option<String>,
    pub(crate) config: Value,
    pub(crate) converted: Option<Converted>,
}

impl Checkpoint {
    /// The opened file or directory.
    pub fn path(&self) -> &Path {
        &self.text.path
    }

    /// The model's configuration: `config.json`, or the same keys from GGUF metadata. Always an object.
    ///
    /// The rope divisors per frequency of a GGUF file, which represent `llama3` scaling there, are the array
    /// `rope_frequency_factors`, with one number per pair of a head's dimensions.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The tokenizer, the chat templates and the generation settings.
    pub fn text(&self) -> &TextFiles {
        &self.text
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
            return Err(CheckpointError::MissingTensor { path: self.text.path.clone(), name: shown(name) });
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

    /// A summary for display.
    pub fn description(&self) -> Description {
        let mut by_storage: BTreeMap<String, u64> = BTreeMap::new();
        let mut quantised = BTreeSet::new();
        let (mut elements, mut bytes) = (0, 0);
        for entry in self.tensors.values() {
            let count = entry.elements() as u64;
            elements += count;
            bytes += entry.stored_bytes() as u64;
            if entry.stored.is_supported() {
                *by_storage.entry(entry.stored.to_string()).or_default() += count;
            }
            if entry.stored.is_quantised() {
                quantised.insert(entry.stored.to_string());
            }
        }
        let mut storage: Vec<_> = by_storage.into_iter().collect();
        storage.sort_by_key(|(_, elements)| std::cmp::Reverse(*elements));
        let names = storage.iter().map(|(name, _)| name.as_str()).filter(|name| quantised.contains(*name));
        let types = names.collect::<Vec<_>>().join(", ");
        Description {
            format: self.text.format,
            files: self.files.iter().map(|file| file.path().to_owned()).collect(),
            tensors: self.tensors.len(),
            elements,
            bytes,
            storage,
            quantization: self.quantization.clone().or((!types.is_empty()).then_some(types)),
        }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.text.path)
            .field("format", &self.text.format)
            .finish_non_exhaustive()
    }
}
