//! The errors of a request before it runs.

use penstock_engine::StartError;
use penstock_text::TextError;
use penstock_types::FieldError;

use crate::adapters::AdapterNotFound;

/// A request cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A parameter does not fit the model or the prompt.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The tokenizer cannot encode the prompt.
    #[error(transparent)]
    Prompt(TextError),
    /// The text of the prompt has more bytes than any prompt of the model. Refused before it is tokenised.
    #[error(
        "the prompt has {bytes} bytes; the limit is {limit}: max_model_len ({max_model_len}) times the length of the \
         longest token in bytes"
    )]
    TextTooLong { bytes: usize, limit: usize, max_model_len: usize },
    /// The text of the prompt has more tokens than are counted. Refused before all of it is tokenised.
    #[error(
        "prompt of more than {counted} tokens exceeds the limit of {limit} (max_model_len {max_model_len})"
    )]
    TooManyTokens { counted: usize, limit: usize, max_model_len: usize },
    /// The text options are not valid.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A schema has keywords or formats that are not supported.
    #[error("{field}: {reason}; {remedy}")]
    UnsupportedSchema { field: &'static str, reason: String, remedy: &'static str },
    /// Too many grammars are being compiled.
    #[error("{0}")]
    Overloaded(String),
    /// The request names an adapter that is not loaded.
    #[error(transparent)]
    Adapter(#[from] AdapterNotFound),
    /// The engine did not accept the request.
    #[error(transparent)]
    Start(#[from] StartError),
}
