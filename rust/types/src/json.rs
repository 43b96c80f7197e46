//! [`Json`]: a value as JSON text.

/// A JSON text.
#[derive(Clone, Debug, PartialEq)]
pub struct Json(pub String);
