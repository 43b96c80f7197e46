//! Misuse of the allocator, as opposed to its exhaustion.

/// A size or a setting out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}; it must be {limit}")]
pub struct InvalidSize {
    /// Name of the setting.
    pub field: &'static str,
    /// What it was.
    pub value: String,
    /// What it may be.
    pub limit: String,
}

impl InvalidSize {
    pub(crate) fn new(field: &'static str, value: impl ToString, limit: impl Into<String>) -> Self {
        Self { field, value: value.to_string(), limit: limit.into() }
    }
}

/// An id that names no block in use. The allocator is as it was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaleBlock {
    /// The block was freed or retired already.
    #[error("the block was given back already")]
    GivenBack,
    /// The block belongs to another allocator.
    #[error("the block belongs to another allocator")]
    Foreign,
}
