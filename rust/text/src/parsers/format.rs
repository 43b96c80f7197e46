//! The reasoning and tool call formats of model families.

/// The format of a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>` … `</think>`, as in DeepSeek-R1 and Qwen 3.
    ThinkTags,
}

impl ReasoningFormat {
    /// Whether `prompt` ends with the opening tag, so that the output starts inside the reasoning.
    pub fn is_opened_by(self, prompt: &str) -> bool {
        prompt.trim_ascii_end().ends_with(self.opening())
    }

    /// The markers of the format. If the tokenizer has one of them as a special token, the decoded text must contain
    /// it.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::ThinkTags => &["<think>", "</think>"],
        }
    }

    pub(super) fn opening(self) -> &'static str {
        match self {
            Self::ThinkTags => "<think>",
        }
    }

    pub(super) fn closing(self) -> &'static [&'static str] {
        match self {
            Self::ThinkTags => &["</think>"],
        }
    }
}

/// The format of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>` `{"name": …, "arguments": {…}}` `</tool_call>`, any number of times, with content before and
    /// between. Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": …, "parameters": {…}}`, optionally after `<|python_tag|>`, several separated by `;`. Llama 3.1 and
    /// later. Without the tag, an object is a call only if it has parameters.
    Llama3Json,
    /// `[TOOL_CALLS]` and a list of `{"name": …, "arguments": {…}}`; later models write each call as
    /// `[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[ARGS]{…}`, with an optional `[CALL_ID]` that is dropped.
    Mistral,
}

/// The literals of a format: `opening`, the calls with `separator` between them, `closing`. A call is `call_opening`,
/// `name_key`, the name as a JSON string, `arguments_key`, the arguments as a JSON object, `call_closing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolLiterals {
    /// Text before the first call.
    pub opening: &'static str,
    /// Text before the object of each call.
    pub call_opening: &'static str,
    /// Start of the object, up to the name.
    pub name_key: &'static str,
    /// Text between the name and the arguments.
    pub arguments_key: &'static str,
    /// End of the object and the text after it.
    pub call_closing: &'static str,
    /// Text between calls.
    pub separator: &'static str,
    /// Text after the last call.
    pub closing: &'static str,
}

impl ToolFormat {
    /// The text around names and arguments.
    pub fn literals(self) -> ToolLiterals {
        let json = ToolLiterals {
            opening: "",
            call_opening: "",
            name_key: r#"{"name": "#,
            arguments_key: r#", "arguments": "#,
            call_closing: "}",
            separator: ", ",
            closing: "",
        };
        match self {
            Self::Hermes => ToolLiterals {
                call_opening: "<tool_call>\n",
                call_closing: "}\n</tool_call>",
                separator: "\n",
                ..json
            },
            Self::Llama3Json => {
                ToolLiterals { arguments_key: r#", "parameters": "#, separator: "; ", ..json }
            }
            Self::Mistral => ToolLiterals { opening: "[TOOL_CALLS] [", closing: "]", ..json },
        }
    }

    /// The markers of the format. If the tokenizer has one of them as a special token, the decoded text must contain
    /// it.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }
}
