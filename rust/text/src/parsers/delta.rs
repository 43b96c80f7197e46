//! The pieces of parsed output.

/// A piece of a model's output. Successive pieces of the same kind belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text of the answer.
    Content(String),
    /// Text of the reasoning before the answer.
    Reasoning(String),
    /// The start of a tool call.
    ToolCall {
        /// Index among the calls of this output.
        index: usize,
        /// The complete name of the function.
        name: String,
        /// The id that the model wrote, if its format has ids.
        id: Option<String>,
    },
    /// A part of a call's arguments.
    Arguments {
        /// Index of the call.
        index: usize,
        /// JSON text. All parts together are the object, as the model wrote it if it wrote JSON; `{}` if a complete
        /// call has no arguments. If the arguments are a string that contains an object, they are that object, in one
        /// part. Other values are passed on as written.
        text: String,
    },
}

/// Appends a delta, merging it with the last one of the same kind. Empty text is dropped.
pub(super) fn add(deltas: &mut Vec<Delta>, delta: Delta) {
    match (deltas.last_mut(), delta) {
        (_, Delta::Content(text) | Delta::Reasoning(text) | Delta::Arguments { text, .. })
            if text.is_empty() => {}
        (Some(Delta::Content(last)), Delta::Content(text))
        | (Some(Delta::Reasoning(last)), Delta::Reasoning(text)) => last.push_str(&text),
        (Some(Delta::Arguments { index, text: last }), Delta::Arguments { index: same, text })
            if *index == same =>
        {
            last.push_str(&text);
        }
        (_, delta) => deltas.push(delta),
    }
}
