//! The head counts of an attention layer.

/// Head counts and head width of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

impl HeadShape {
    /// Width of the query part of a row.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the key part of a row, and of the value part.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of a row of query, key and value.
    pub fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }
}
