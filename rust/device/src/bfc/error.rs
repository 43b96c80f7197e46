//! The error of an invalid allocation id.

/// An id does not name a block in use. The allocator is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaleBlock {
    /// The block was freed or retired before.
    #[error("the block was already freed")]
    Freed,
    /// The block belongs to another allocator.
    #[error("the block belongs to another allocator")]
    Foreign,
}
