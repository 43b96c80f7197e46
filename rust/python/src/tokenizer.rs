//! `Tokenizer`: the tokenizer, chat templates and special tokens of a model, with or without an engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use penstock_checkpoint::{GenerationConfig, SpecialTokens, TextFiles};
use penstock_frontend::field::{Field, TOKEN_IDS};
use penstock_text::{TextError, TextOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::detach::{IsWanted, detach, detach_deep, detach_while_wanted};
use crate::errors::Error;
use crate::model_files::ModelFiles;
use crate::value::{PyValue, request_error};

/// Most token ids that are decoded at once.
const MAX_DECODED: usize = 1 << 26;

/// See `_core.pyi`.
#[pyclass(frozen, skip_from_py_object, module = "penstock._core")]
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    tokenizer: penstock_text::Tokenizer,
    chat_templates: BTreeMap<String, String>,
    special_tokens: SpecialTokens,
    generation: GenerationConfig,
}

#[pymethods]
impl Tokenizer {
    #[staticmethod]
    fn open(py: Python<'_>, model: ModelFiles) -> Result<Self, Error> {
        let open = || {
            let text = model.open_text()?;
            let tokenizer =
                penstock_text::Tokenizer::with_added_tokens(text.tokenizer()?, text.added_tokens())?;
            Ok(Self::new(tokenizer, &text, text.chat_templates().clone()))
        };
        detach_deep(py, open, || ())?
    }

    #[pyo3(signature = (text, *, add_special_tokens = true, max_tokens = None))]
    fn encode(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        add_special_tokens: bool,
        max_tokens: Option<&Bound<'_, PyAny>>,
    ) -> Result<Vec<u32>, Error> {
        let text = Field::new("prompt").text(&PyValue(text.clone())).map_err(request_error)?;
        let max_tokens = match max_tokens {
            None => usize::MAX,
            Some(value) => {
                let range = 0..=i128::from(u32::MAX);
                let field = Field::new("max_tokens");
                field.integer(&PyValue(value.clone()), range).map_err(request_error)? as usize
            }
        };
        if text.len() > max_tokens.saturating_mul(self.0.tokenizer.max_token_bytes()) {
            return Err(penstock_frontend::Error::Prompt(TextError::TooManyTokens { max_tokens }).into());
        }
        let encode = |is_wanted: IsWanted<'_>| {
            self.0.tokenizer.encode_while(&text, add_special_tokens, max_tokens, is_wanted)
        };
        let ids = detach_while_wanted(py, None, encode)?;
        Ok(ids.map_err(penstock_frontend::Error::Prompt)?)
    }

    #[pyo3(signature = (token_ids, *, skip_special_tokens = true, spaces_between_special_tokens = false))]
    fn decode(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> Result<String, Error> {
        let token_ids = PyValue(token_ids.clone());
        let token_ids = Field::new("token_ids").token_ids(&token_ids, MAX_DECODED, TOKEN_IDS);
        let token_ids = token_ids.map_err(request_error)?;
        let options =
            TextOptions { skip_special_tokens, spaces_between_special_tokens, ..TextOptions::default() };
        detach(py, || self.0.tokenizer.decode(&token_ids, options))
    }

    fn token_bytes<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
    ) -> Result<Vec<Bound<'py, PyBytes>>, Error> {
        let given = PyValue(token_ids.clone());
        let token_ids = Field::new("token_ids").token_ids(&given, MAX_DECODED, TOKEN_IDS);
        let token_ids = token_ids.map_err(request_error)?;
        let tokenizer = &self.0.tokenizer;
        if !tokenizer.has_token_bytes() {
            let limit = "decoded together: this tokenizer joins words with spaces, so a token has no bytes of its own";
            return Err(request_error(Field::new("token_ids").refuse(&given, limit)));
        }
        let bytes = |id| tokenizer.token_bytes(id).map_or(&[][..], |token| token.bytes);
        Ok(token_ids.into_iter().map(|id| PyBytes::new(py, bytes(id))).collect())
    }

    fn token_names(&self, token_ids: &Bound<'_, PyAny>) -> Result<Vec<String>, Error> {
        let given = PyValue(token_ids.clone());
        let token_ids = Field::new("token_ids").token_ids(&given, MAX_DECODED, TOKEN_IDS);
        let token_ids = token_ids.map_err(request_error)?;
        Ok(token_ids.into_iter().map(|id| self.0.tokenizer.id_to_token(id).unwrap_or_default()).collect())
    }

    #[getter]
    fn chat_templates(&self) -> &BTreeMap<String, String> {
        &self.0.chat_templates
    }

    #[getter]
    fn special_tokens(&self) -> Vec<(&'static str, &str)> {
        let SpecialTokens { bos, eos, unk, pad } = &self.0.special_tokens;
        let named = [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)];
        named.into_iter().filter_map(|(name, token)| Some((name, token.as_deref()?))).collect()
    }

    #[getter]
    fn vocabulary_size(&self) -> usize {
        self.0.tokenizer.vocabulary_size()
    }

    /// The ids of the generation settings, else that of the special token.
    #[getter]
    fn eos_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let Inner { generation, special_tokens, .. } = &*self.0;
        let ids = &generation.eos_token_ids;
        let own = special_tokens.eos.as_deref().and_then(|token| self.0.tokenizer.token_to_id(token));
        if ids.is_empty() { PyTuple::new(py, own.as_slice()) } else { PyTuple::new(py, ids) }
    }

    #[getter]
    fn bos_token_id(&self) -> Option<u32> {
        let Inner { generation, special_tokens, tokenizer, .. } = &*self.0;
        let own = special_tokens.bos.as_deref().and_then(|token| tokenizer.token_to_id(token));
        own.or(generation.bos_token_id)
    }
}

impl Tokenizer {
    /// A tokenizer with the special tokens of a model, and chat templates by name.
    pub fn new(
        tokenizer: penstock_text::Tokenizer,
        text: &TextFiles,
        chat_templates: BTreeMap<String, String>,
    ) -> Self {
        Self(Arc::new(Inner {
            tokenizer,
            chat_templates,
            special_tokens: text.special_tokens().clone(),
            generation: text.generation().clone(),
        }))
    }
}
