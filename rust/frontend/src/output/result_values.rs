//! The types of fields of the generated result types.

/// Ids and log probabilities of the most likely tokens at a position.
pub type TopLogprobs = Vec<(u32, f32)>;

/// The stop condition of an output with the finish reason `stop`.
#[derive(Clone, Debug, PartialEq)]
pub enum StopReason {
    Text(String),
    Token(u32),
    Sequence(Vec<u32>),
}
