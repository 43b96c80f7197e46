//! The tool call formats of the model families.

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>` `{"name": …, "arguments": {…}}` `</tool_call>`, any number of times, with content before
    /// and between; Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `{"name": …, "parameters": {…}}` and nothing before but `<|python_tag|>`, several separated by `;`;
    /// Llama 3.1 and later. Without the tag, an object is a call only if it has parameters.
    Llama3Json,
    /// `[TOOL_CALLS]` and a list of `{"name": …, "arguments": {…}}`, or, of later models, each call as
    /// `[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[ARGS]{…}`, with a `[CALL_ID]` that is dropped.
    Mistral,
}

/// The literals of a format: calls are `opening`, then calls with `separator` between them, then `closing`. A
/// call is `call_opening`, `name_key`, the name as a JSON string, `arguments_key`, the arguments as a JSON
/// object, and `call_closing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolLiterals {
    /// Before the first call.
    pub opening: &'static str,
    /// Before the object of each call.
    pub call_opening: &'static str,
    /// The beginning of the object, up to the name.
    pub name_key: &'static str,
    /// Between the name and the arguments.
    pub arguments_key: &'static str,
    /// The end of the object and what follows it.
    pub call_closing: &'static str,
    /// Between calls.
    pub separator: &'static str,
    /// After the last call.
    pub closing: &'static str,
}

impl ToolFormat {
    /// What a model writes around names and arguments.
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

    /// What calls are told from content by. Where a tokenizer has one of these as a special token, the text must show
    /// it.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }
}
