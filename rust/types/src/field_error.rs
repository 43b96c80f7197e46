//! The error for a field of a configuration or of a request.

/// A field has a value that is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}={value} is not allowed: it must be {limit}")]
pub struct FieldError {
    /// The field's name in the Python API.
    pub field: &'static str,
    /// The value, as text.
    pub value: String,
    /// The allowed values; completes the sentence "it must be ...".
    pub limit: String,
}

impl FieldError {
    /// An error for `field`.
    pub fn new(field: &'static str, value: impl ToString, limit: impl Into<String>) -> Self {
        Self { field, value: value.to_string(), limit: limit.into() }
    }
}
