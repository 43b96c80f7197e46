//! What a text may be asked to look like.

/// The shape a generated text must have. Equal values compile once and share what was compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(clippy::large_enum_variant, reason = "there is one in a request")]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// A JSON value that is valid under a schema, given as JSON text. Properties come in the schema's order.
    JsonSchema(String),
    /// A text that the regular expression matches from its first to its last character, in the syntax of
    /// Rust's `regex`. A leading `^` and a final `$` say no more than that and may be there.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in llguidance's dialect of Lark; it begins at the rule `start`.
    Lark(String),
    /// A grammar in llama.cpp's notation. llguidance has no conversion of it, so it is refused.
    Gbnf(String),
    /// Calls of tools, as chat templates write them.
    ToolCalls(ToolCalls),
}

impl Grammar {
    /// Names the kind in messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
            Self::ToolCalls(_) => "tool calls",
        }
    }

    /// Bytes of everything in it.
    pub(crate) fn source_bytes(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(source) | Self::Regex(source) | Self::Lark(source) | Self::Gbnf(source) => {
                source.len()
            }
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
            Self::ToolCalls(calls) => calls.source_bytes(),
        }
    }
}

/// How a model writes the calls of tools:
///
/// `opening call_opening {"name_key": "tool", "arguments_key": {...}} call_closing separator ... closing`
///
/// without the spaces. Each literal may hold special tokens by their names: such a part may then come as that
/// token or spelled out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ToolCalls {
    /// Comes once, before the first call.
    pub opening: String,
    /// Comes before each call.
    pub call_opening: String,
    /// Key of the tool's name.
    pub name_key: String,
    /// Key of its arguments.
    pub arguments_key: String,
    /// Comes after each call.
    pub call_closing: String,
    /// Comes between two calls.
    pub separator: String,
    /// Comes once, after the last call.
    pub closing: String,
    /// The name of each tool and the JSON schema of its arguments, as JSON text.
    pub tools: Vec<(String, String)>,
    /// There may be several calls.
    pub parallel: bool,
    /// The tags of a block of thoughts that may come first. If the opening tag is empty, the prompt has opened
    /// the block, so the text begins inside it.
    pub thinking: Option<(String, String)>,
}

impl ToolCalls {
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
        let tags = self.thinking.iter().flat_map(|(open, close)| [open, close]);
        let tools = self.tools.iter().flat_map(|(name, schema)| [name, schema]);
        literals.into_iter().chain(tags).chain(tools).map(String::len).sum()
    }
}
