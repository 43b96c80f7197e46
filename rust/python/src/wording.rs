//! What the tokens of a choice say: their text, and what that means where somebody wants to know.
//!
//! ```text
//! tokens ── raw ──────────────────────────────> text
//!        └─ marked, or the text itself ── parser ──> content, reasoning, tool calls
//! ```
//!
//! There is a second text only where the parser goes by special tokens that the first one leaves out. Stop strings are
//! looked for in both, and the first that is found ends both.

use std::sync::Arc;

use penstock_text::parsers::{Delta, OutputParser, ReasoningFormat, ToolFormat};
use penstock_text::{StopMatch, StopSequences, TextError, TextOptions, TextStream, Tokenizer};

use crate::output::Output;
use crate::script::Script;

/// How the tokens of all choices of a request become text.
pub struct Style {
    pub tokenizer: Tokenizer,
    pub options: TextOptions,
    /// Strings that end the text.
    pub stops: Vec<String>,
    /// Sequences of ids that end the request, none empty.
    pub sequences: Vec<Vec<u32>>,
    /// The prompt's text, where the text begins with it.
    pub echo: Option<String>,
    /// What the output is parsed for, if for anything.
    pub formats: Option<Formats>,
}

/// What to look for in an output.
#[derive(Clone, Copy)]
pub struct Formats {
    /// The format of reasoning, and whether the prompt has opened it.
    pub reasoning: Option<(ReasoningFormat, bool)>,
    /// The format of tool calls.
    pub tools: Option<ToolFormat>,
    /// Whether what follows on a call is content.
    pub one_call: bool,
}

/// The text of one choice.
pub struct Wording {
    style: Arc<Style>,
    sequences: StopSequences,
    raw: Script,
    parsing: Option<Parsing>,
}

struct Parsing {
    parser: OutputParser,
    marked: Option<Marked>,
    deltas: Vec<Delta>,
}

/// A text with those special tokens that the parser goes by, and no others.
struct Marked {
    script: Script,
    markers: Vec<u32>,
}

impl Style {
    /// The texts of `count` choices, which have said nothing yet.
    pub fn wordings(self, count: usize) -> Result<Vec<Wording>, TextError> {
        let style = Arc::new(self);
        let raw = TextStream::new(&style.tokenizer, style.options, &style.stops)?;
        let markers = style.markers();
        let marked_stream = match markers.is_empty() {
            true => None,
            false => Some(TextStream::new(&style.tokenizer, style.marked_options(), &style.stops)?),
        };
        let marked = |stream: TextStream| Marked { script: Script::new(stream), markers: markers.clone() };
        let parser = |Formats { reasoning, tools, one_call }| {
            let parser = OutputParser::new(reasoning, tools);
            if one_call { parser.with_one_call() } else { parser }
        };
        let parsing = |formats| Parsing {
            parser: parser(formats),
            marked: marked_stream.clone().map(marked),
            deltas: Vec::new(),
        };
        // Text that stays whatever comes need not wait.
        let waited_for = if style.options.include_stop_str_in_output { &[][..] } else { &style.sequences };
        let sequences = StopSequences::new(waited_for);
        let wording = |_| Wording {
            sequences: sequences.clone(),
            raw: Script::new(raw.clone()),
            parsing: style.formats.map(parsing),
            style: Arc::clone(&style),
        };
        Ok((0..count).map(wording).collect())
    }

    /// Special tokens that the parser goes by and the text leaves out.
    fn markers(&self) -> Vec<u32> {
        let Some(formats) = self.formats.filter(|_| self.options.skip_special_tokens) else {
            return Vec::new();
        };
        let reasoning = formats.reasoning.map_or(&[][..], |(format, _)| format.markers());
        let markers = reasoning.iter().chain(formats.tools.map_or(&[][..], ToolFormat::markers));
        let ids = markers.filter_map(|marker| self.tokenizer.token_to_id(marker));
        ids.filter(|id| self.is_special(*id)).collect()
    }

    /// As the text's own, but for the special tokens: no other character differs.
    fn marked_options(&self) -> TextOptions {
        TextOptions { skip_special_tokens: false, spaces_between_special_tokens: false, ..self.options }
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer.token_bytes(id).is_some_and(|token| token.special)
    }
}

impl Wording {
    /// Whether it says what the text means.
    pub fn is_parsed(&self) -> bool {
        self.parsing.is_some()
    }

    /// Whether stop strings, tokens and sequences are part of the text.
    pub fn includes_stops(&self) -> bool {
        self.style.options.include_stop_str_in_output
    }

    /// Before the first token and before the end: the prompt's text comes first, where that was asked for.
    pub fn begin(&self, output: &mut Output) {
        if let Some(echo) = self.style.echo.as_deref().filter(|_| output.token_ids.is_empty()) {
            output.text = echo.to_owned();
            output.echoed = echo.len();
        }
    }

    /// Adds a token. Says which stop string ended the text, if one did: then nothing follows.
    pub fn push(&mut self, token: u32, output: &mut Output) -> Option<&str> {
        let num_open = self.sequences.push(token);
        let stop = self.raw.push(Some(token), num_open);
        let marked = self.parsing.as_mut().and_then(|parsing| parsing.marked.as_mut());
        let stop = stop.or(marked.and_then(|marked| marked.push(token, num_open, &self.style)));
        if stop.is_some() {
            return self.finish(output);
        }
        self.pass_on(output);
        None
    }

    /// Says that no token follows: all text is certain now. That may complete a stop string, too.
    pub fn finish(&mut self, output: &mut Output) -> Option<&str> {
        let stop = self.raw.finish();
        let marked = self.parsing.as_mut().and_then(|parsing| parsing.marked.as_mut());
        let stop = stop.or(marked.and_then(|marked| marked.script.finish()));
        self.end(output);
        stop.map(|StopMatch { stop }| &*self.style.stops[stop])
    }

    /// Says that no token follows, and that the last `num_stopping` are a stop sequence, which the text leaves out.
    pub fn finish_without(&mut self, num_stopping: usize, output: &mut Output) {
        let style = &self.style;
        let tokens = &output.token_ids[..output.token_ids.len() - num_stopping];
        self.raw.end_as(&style.tokenizer.decode(tokens, style.options));
        if let Some(marked) = self.parsing.as_mut().and_then(|parsing| parsing.marked.as_mut()) {
            let shown: Vec<_> = tokens.iter().copied().filter(|token| marked.shows(*token, style)).collect();
            marked.script.end_as(&style.tokenizer.decode(&shown, style.marked_options()));
        }
        self.end(output);
    }

    /// Passes on what is certain.
    fn pass_on(&mut self, output: &mut Output) {
        let text = self.raw.take();
        if let Some(Parsing { parser, marked, deltas }) = &mut self.parsing {
            match marked {
                Some(marked) => parser.push(&marked.script.take(), deltas),
                None => parser.push(&text, deltas),
            }
            output.parsed.extend(deltas.drain(..));
        }
        output.extend_text(text);
    }

    fn end(&mut self, output: &mut Output) {
        self.pass_on(output);
        if let Some(Parsing { parser, deltas, .. }) = &mut self.parsing {
            parser.finish(deltas);
            output.parsed.extend(deltas.drain(..));
        }
    }
}

impl Marked {
    fn push(&mut self, token: u32, num_open: usize, style: &Style) -> Option<StopMatch> {
        let shown = self.shows(token, style).then_some(token);
        self.script.push(shown, num_open)
    }

    fn shows(&self, token: u32, style: &Style) -> bool {
        self.markers.contains(&token) || !style.is_special(token)
    }
}
