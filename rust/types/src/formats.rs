//! The output formats of model families, as data. The rows are in `rust/text`; parsers, grammars and prompts read them.

/// Spellings of a piece of text; the first is the one that models are trained on.
pub type Spellings = &'static [&'static str];

/// The formats of a model's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatSpec {
    /// The format of the reasoning before the answer, if it is parsed.
    pub reasoning: Option<&'static ReasoningFormat>,
    /// The format of tool calls, if they are parsed.
    pub tools: Option<&'static ToolFormat>,
}

/// The text on either side of something. An empty list means that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrap {
    /// The text before it.
    pub open: Spellings,
    /// The text after it.
    pub close: Spellings,
}

/// The format of a model's reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningFormat {
    /// The text around the reasoning.
    pub block: Wrap,
    /// A word after the opening that is no reasoning.
    pub label: &'static str,
    /// The text around the answer, which is no content.
    pub answer: Wrap,
    /// Whether a closing without an opening, at the start of the output, stands for no reasoning.
    pub has_bare_close: bool,
    /// Whether several blocks can follow each other.
    pub repeats: bool,
}

/// The format of a model's tool calls.
#[derive(Debug, PartialEq, Eq)]
pub struct ToolFormat {
    /// The text around all calls of an answer. Models leave it out, so each call is found without it.
    pub section: Wrap,
    /// The text around each call.
    pub call: Wrap,
    /// The notation of a call.
    pub form: CallForm,
    /// Whether calls are found only at the start of the answer, also without their opening text.
    pub at_start: bool,
    /// A format that the answer may have in place of this one, if it starts in another way.
    pub alternative: Option<&'static ToolFormat>,
    /// Whether an opening inside the reasoning ends it: it is a control token, which a model does not quote.
    pub ends_reasoning: bool,
    /// The text of constrained calls, if they can be constrained.
    pub literals: Option<ToolLiterals>,
}

/// The notation of a call.
#[derive(Debug, PartialEq, Eq)]
pub enum CallForm {
    /// Arguments as a JSON object.
    Json(JsonCall),
    /// A tag for each argument.
    Tagged(TaggedCall),
    /// Arguments as literals of a programming language.
    Literal(LiteralCall),
}

/// A call with its arguments as a JSON object. The name is in the same object or in a header before it.
#[derive(Debug, PartialEq, Eq)]
pub struct JsonCall {
    /// The keys of an object with name and arguments, if calls are such objects.
    pub object: Option<ObjectKeys>,
    /// Whether the objects may be items of a list.
    pub is_list: bool,
    /// The text between two objects outside a list, if they can follow each other: a character, or nothing.
    pub separator: Option<&'static str>,
    /// The header, if the arguments can follow one.
    pub header: Option<Header>,
}

/// The keys of a call that is a JSON object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectKeys {
    /// The keys of the name. Without one, the only key of the object is the name and its value the arguments.
    pub name: Spellings,
    /// The keys of the arguments.
    pub arguments: Spellings,
    /// The keys of the id.
    pub id: Spellings,
}

/// The text between the opening of a call and its arguments.
#[derive(Debug, PartialEq, Eq)]
pub struct Header {
    /// Text before the name that does not belong to it.
    pub prefix: &'static str,
    /// Text after the name.
    pub end: Spellings,
    /// Whether the text after the name may be left out.
    pub end_is_optional: bool,
    /// Whether the header is one word, so that whitespace inside it is no header.
    pub is_word: bool,
    /// The place of the call's id.
    pub id: IdPlace,
}

/// The place of a call's id in its header.
#[derive(Debug, PartialEq, Eq)]
pub enum IdPlace {
    /// The format has no ids.
    None,
    /// It is before the name, and this text is between them.
    Before(&'static str),
    /// It is after the name, and this text is between them.
    After(&'static str),
    /// It is the header itself: `functions.`, the name, a colon and a number. All except the name can be missing.
    Kimi,
}

/// A call whose arguments have tags of their own.
#[derive(Debug, PartialEq, Eq)]
pub struct TaggedCall {
    /// The text after the name. Without one, the name ends where a tag begins.
    pub name_end: Spellings,
    /// The text around the key of an argument. A key ends at a quotation mark, if there is one before the text.
    pub key: Wrap,
    /// The attribute after the key that says whether a value is a string, with its quotation mark. Without one, the
    /// tool's schema says it.
    pub attribute: &'static str,
    /// The text around the value of an argument.
    pub value: Wrap,
    /// Whether a line feed on either side of a value is not part of it.
    pub trims_line: bool,
}

/// A call with its arguments as literals: `name(key=value, …)` or `name{key:value,…}`.
#[derive(Debug, PartialEq, Eq)]
pub struct LiteralCall {
    /// Text before the name that does not belong to it.
    pub prefix: &'static str,
    /// Whether the calls are items of a list in brackets.
    pub is_list: bool,
    /// The text between two calls outside a list, if they can follow each other: a character, or nothing.
    pub separator: Option<&'static str>,
    /// The character before the arguments.
    pub open: char,
    /// The character between key and value.
    pub assign: char,
    /// The character after the arguments.
    pub close: char,
    /// The text on either side of a string. Without one, strings are quoted as in Python.
    pub quote: &'static str,
}

/// The literals of constrained calls: `opening`, the calls with `separator` between them, `closing`. A call is
/// `call_opening`, `name_key`, the name as a JSON string, `arguments_key`, the arguments as a JSON object,
/// `call_closing`.
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

impl Wrap {
    /// No text.
    pub const NONE: Self = Self { open: &[], close: &[] };

    /// All spellings of both texts.
    pub fn all(self) -> impl Iterator<Item = &'static str> {
        self.open.iter().chain(self.close).copied()
    }
}

impl ReasoningFormat {
    /// Whether `prompt` ends with the opening, so that the output starts inside the reasoning.
    pub fn is_opened_by(&self, prompt: &str) -> bool {
        let prompt = prompt.trim_ascii_end();
        let prompt = prompt.strip_suffix(self.label).unwrap_or(prompt);
        self.block.open.iter().any(|open| prompt.ends_with(open.trim_ascii_end()))
    }

    /// The markers of the format. If the tokenizer has one of them as a special token, the decoded text must contain
    /// it.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        self.block.all().chain(self.answer.all()).flat_map(tokens_of)
    }
}

impl ToolFormat {
    /// Whether the schemas of the tools are needed to know the types of arguments.
    pub fn needs_schemas(&self) -> bool {
        matches!(&self.form, CallForm::Tagged(call) if call.attribute.is_empty())
    }

    /// The markers of the format, as those of a [`ReasoningFormat`].
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let (mut more, mut wraps) = (Vec::new(), vec![self.section, self.call]);
        match &self.form {
            CallForm::Json(JsonCall { header: Some(Header { prefix, end, id, .. }), .. }) => {
                wraps.push(Wrap { open: &[], close: end });
                more.push(*prefix);
                if let IdPlace::Before(text) | IdPlace::After(text) = id {
                    more.push(text);
                }
            }
            CallForm::Json(_) => {}
            CallForm::Tagged(call) => {
                wraps.extend([Wrap { open: call.name_end, close: &[] }, call.key, call.value]);
            }
            CallForm::Literal(call) => more.push(call.quote),
        }
        let more = more.into_iter().chain(wraps.into_iter().flat_map(Wrap::all));
        let alternative =
            self.alternative.into_iter().flat_map(|format| format.section.all().chain(format.call.all()));
        more.chain(alternative).flat_map(tokens_of)
    }
}

/// A marker, and the tokens in angle brackets of which it may consist.
fn tokens_of(marker: &'static str) -> impl Iterator<Item = &'static str> {
    let starts = marker.match_indices('<').map(|(at, _)| at);
    let token = move |at: usize| marker[at..].find('>').map(|end| &marker[at..=at + end]);
    std::iter::once(marker)
        .filter(|marker| !marker.is_empty())
        .chain(starts.filter_map(token).filter(move |token| *token != marker))
}
