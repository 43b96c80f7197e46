//! The parts of a model that describe its text: vocabulary, special tokens, chat templates, generation and embedding
//! settings.

use std::collections::BTreeMap;
use std::path::PathBuf;

use penstock_types::GenerationConfig;

use crate::embedding::EmbeddingConfig;
use crate::error::CheckpointError;
use crate::tokenizer::{AddedToken, SpecialTokens, TokenizerSource};

/// Maximum number of chat templates in files that can have any number of them.
pub(crate) const MAX_TEMPLATES: usize = 64;

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

/// The text files of a model, without its weights.
#[derive(Clone, Debug)]
pub struct TextFiles {
    pub(crate) path: PathBuf,
    pub(crate) format: FileFormat,
    pub(crate) generation: GenerationConfig,
    pub(crate) tokenizer: Option<TokenizerSource>,
    pub(crate) special_tokens: SpecialTokens,
    pub(crate) added_tokens: Vec<AddedToken>,
    pub(crate) chat_templates: BTreeMap<String, String>,
    pub(crate) embedding: EmbeddingConfig,
}

impl TextFiles {
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
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

    /// The pooling of hidden states.
    pub fn embedding(&self) -> &EmbeddingConfig {
        &self.embedding
    }
}
