//! The source of a grammar, as a request gives it.

/// A constraint on generated text. Equal specs are compiled once and share the compiled grammar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(clippy::large_enum_variant, reason = "a request has at most one")]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// A JSON value that is valid under this schema, given as JSON text. Properties appear in the schema's order.
    JsonSchema(String),
    /// The same without the keywords and formats that are not supported: they are ignored, and `oneOf` is `anyOf`.
    LenientJsonSchema(String),
    /// A regular expression, in the syntax of Rust's `regex`, that matches the whole text. A leading `^` and a trailing
    /// `$` are accepted and have no effect.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's dialect of Lark. The start rule is `start`.
    Lark(String),
    /// A grammar in GBNF, llama.cpp's notation. The start rule is `root`.
    Gbnf(String),
    /// Tool calls in the format of a chat template.
    ToolCalls(ToolCallSpec),
}

impl GrammarSpec {
    /// The name of the variant in error messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) | Self::LenientJsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
            Self::ToolCalls(_) => "tool calls",
        }
    }

    /// Total size of all strings, in bytes.
    pub(crate) fn source_bytes(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(source)
            | Self::LenientJsonSchema(source)
            | Self::Regex(source)
            | Self::Lark(source)
            | Self::Gbnf(source) => source.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
            Self::ToolCalls(calls) => calls.source_bytes(),
        }
    }
}

/// The format in which a model writes tool calls:
///
/// `opening call_opening {"name_key": "tool", "arguments_key": {...}} call_closing separator ... closing`
///
/// without the spaces. Literals may contain names of special tokens: such a part matches the special token and also its
/// spelled-out text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ToolCallSpec {
    /// Text before the first call.
    pub opening: String,
    /// Text before each call.
    pub call_opening: String,
    /// JSON key of the tool's name.
    pub name_key: String,
    /// JSON key of the arguments.
    pub arguments_key: String,
    /// Text after each call.
    pub call_closing: String,
    /// Text between two calls.
    pub separator: String,
    /// Text after the last call.
    pub closing: String,
    pub tools: Vec<ToolSpec>,
    /// Whether more than one call is allowed.
    pub parallel: bool,
    /// Opening and closing tag of an optional reasoning block before the calls. If the opening tag is empty, the prompt
    /// ends with it, so the text starts inside the block.
    pub reasoning: Option<(String, String)>,
}

/// A tool that can be called.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ToolSpec {
    pub name: String,
    /// The JSON schema of the arguments, as JSON text.
    pub schema: String,
    /// Whether the schema is read as a [`GrammarSpec::LenientJsonSchema`].
    pub ignores_unsupported: bool,
}

impl ToolCallSpec {
    fn source_bytes(&self) -> usize {
        let literals = [
            &self.opening,
            &self.call_opening,
            &self.name_key,
            &self.arguments_key,
            &self.call_closing,
            &self.separator,
            &self.closing,
        ];
        let tags = self.reasoning.iter().flat_map(|(open, close)| [open, close]);
        let tools = self.tools.iter().flat_map(|tool| [&tool.name, &tool.schema]);
        literals.into_iter().chain(tags).chain(tools).map(String::len).sum()
    }
}
