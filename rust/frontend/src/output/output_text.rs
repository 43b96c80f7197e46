//! The text of one choice, and its content, reasoning and tool calls if it is parsed; and how much of it was taken.
//!
//! ```text
//! tokens ── plain ─────────────────────────────────> text
//!        └─ marked, or the plain text ── parser ───> content, reasoning, tool calls
//! ```
//!
//! The text is kept once, as a whole. A chunk has the part of it that was final and not taken yet.
//!
//! A second text exists only if the parser uses special tokens that the first one omits. Stop strings are searched in
//! both; the first one found ends both.

use std::sync::Arc;

use penstock_text::parsers::{Delta, OutputParser, ToolSchemas};
use penstock_text::{StopMatch, StopSequences, TextError, TextOptions, TextStream, Tokenizer};
use penstock_types::{ReasoningFormat, ToolFormat};

use super::parsed_output::ParsedOutput;
use super::text_buffer::TextBuffer;

/// The conversion of the tokens of all choices of a request to text.
pub struct OutputOptions {
    pub tokenizer: Tokenizer,
    pub options: TextOptions,
    /// Stop strings.
    pub stops: Vec<String>,
    /// Stop token sequences, none empty.
    pub sequences: Vec<Vec<u32>>,
    /// The prompt, if the text begins with it.
    pub echo: Option<Echo>,
    /// The name of the adapter, if any.
    pub adapter: Option<String>,
    /// The formats to parse, if any.
    pub formats: Option<OutputFormats>,
}

/// A prompt that is part of the text.
pub enum Echo {
    Text(String),
    /// Its last character can be incomplete, and is completed by the first tokens.
    Tokens(Vec<u32>),
}

/// The formats that an output is parsed for.
#[derive(Clone)]
pub struct OutputFormats {
    /// The reasoning format, and whether the prompt opens the reasoning.
    pub reasoning: Option<(&'static ReasoningFormat, bool)>,
    pub tools: Option<&'static ToolFormat>,
    /// The schemas of the tools, for arguments that the format writes as raw text.
    pub schemas: Arc<ToolSchemas>,
    /// Whether text after the first call is content.
    pub one_call: bool,
    /// Whether the answer consists of calls.
    pub requires_call: bool,
}

/// The text of one choice.
pub struct OutputText {
    options: Arc<OutputOptions>,
    /// The prompt's text, if the text begins with it and has not begun.
    echo: Option<Arc<str>>,
    sequences: StopSequences,
    plain: TextBuffer,
    /// The length of the prompt's text at the begin of the text.
    num_echoed: usize,
    /// Bytes of the text that were taken.
    num_taken: usize,
    parsing: Option<Parsing>,
    /// Empty if the text is not parsed.
    pub parsed: ParsedOutput,
}

struct Parsing {
    parser: OutputParser,
    /// Bytes of the text that the parser has read.
    num_read: usize,
    marked: Option<MarkedText>,
    deltas: Vec<Delta>,
}

/// A text that includes the special tokens the parser uses, and no others.
struct MarkedText {
    buffer: TextBuffer,
    markers: Vec<u32>,
}

impl OutputOptions {
    /// The empty texts of `count` choices.
    pub fn texts(self, count: usize) -> Result<Vec<OutputText>, TextError> {
        let options = Arc::new(self);
        let mut plain = TextStream::new(&options.tokenizer, options.options, &options.stops)?;
        let echo = options.echo.as_ref().map(|echo| match echo {
            Echo::Text(text) => Arc::from(&**text),
            Echo::Tokens(ids) => plain.begin_after(ids).into(),
        });
        let markers = options.markers();
        let marked_stream = match markers.is_empty() {
            true => None,
            false => Some(TextStream::new(&options.tokenizer, options.marked_options(), &options.stops)?),
        };
        let marked = |stream| MarkedText { buffer: TextBuffer::new(stream), markers: markers.clone() };
        let parser = |formats: &OutputFormats| {
            let parser = OutputParser::new(formats.reasoning, formats.tools, &formats.schemas);
            let parser = if formats.one_call { parser.with_one_call() } else { parser };
            if formats.requires_call { parser.with_required_call() } else { parser }
        };
        let parsing = |formats: &OutputFormats| Parsing {
            parser: parser(formats),
            num_read: 0,
            marked: marked_stream.clone().map(marked),
            deltas: Vec::new(),
        };
        // If the text includes stop sequences, no text is held back for them.
        let held_back: &[_] =
            if options.options.include_stop_str_in_output { &[] } else { &options.sequences };
        let sequences = StopSequences::new(held_back);
        let text = |_| OutputText {
            sequences: sequences.clone(),
            echo: echo.clone(),
            plain: TextBuffer::new(plain.clone()),
            num_echoed: 0,
            num_taken: 0,
            parsed: ParsedOutput::default(),
            parsing: options.formats.as_ref().map(parsing),
            options: Arc::clone(&options),
        };
        Ok((0..count).map(text).collect())
    }

    /// Special tokens that the parser uses and the text omits.
    fn markers(&self) -> Vec<u32> {
        let Some(formats) = self.formats.as_ref().filter(|_| self.options.skip_special_tokens) else {
            return Vec::new();
        };
        let reasoning = formats.reasoning.into_iter().flat_map(|(format, _)| format.markers());
        let markers = reasoning.chain(formats.tools.into_iter().flat_map(ToolFormat::markers));
        let ids = markers.filter_map(|marker| self.tokenizer.token_to_id(marker));
        ids.filter(|id| self.is_special(*id)).collect()
    }

    /// The text's options except for special tokens, so that all other characters are the same.
    fn marked_options(&self) -> TextOptions {
        TextOptions { skip_special_tokens: false, spaces_between_special_tokens: false, ..self.options }
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer.token_bytes(id).is_some_and(|token| token.special)
    }
}

impl OutputText {
    /// Whether stop strings, tokens and sequences are part of the text.
    pub fn includes_stops(&self) -> bool {
        self.options.options.include_stop_str_in_output
    }

    /// Puts the prompt's text first, if requested. Called before the first token and before the end.
    pub fn begin(&mut self) {
        if let Some(echo) = self.echo.take() {
            self.plain.begin(&echo);
            self.num_echoed = echo.len();
        }
    }

    /// Adds a token. Returns the stop string that ended the text, if any; then no token follows.
    pub fn push(&mut self, token: u32) -> Option<&str> {
        let held_back = self.sequences.push(token);
        let stop = self.plain.push(Some(token), held_back);
        let stop =
            stop.or(self.marked().and_then(|(marked, options)| marked.push(token, held_back, options)));
        if stop.is_some() {
            return self.finish();
        }
        self.parse();
        None
    }

    /// Ends the text. The text that was held back may complete a stop string.
    pub fn finish(&mut self) -> Option<&str> {
        let stop = self.plain.finish();
        let stop = stop.or(self.marked().and_then(|(marked, _)| marked.buffer.finish()));
        self.parse_rest();
        stop.map(|StopMatch { stop }| &*self.options.stops[stop])
    }

    /// Ends the text without the last `num_stopping` of its tokens, which are a stop sequence.
    pub fn finish_without(&mut self, num_stopping: usize, token_ids: &[u32]) {
        let tokens = &token_ids[..token_ids.len() - num_stopping];
        let (before, start) = match &self.options.echo {
            Some(Echo::Tokens(ids)) => (&ids[..], 0),
            _ => (&[][..], self.num_echoed),
        };
        let rest = self.options.tokenizer.decode(&[before, tokens].concat(), self.options.options);
        self.plain.finish_as(start, &rest);
        if let Some((marked, options)) = self.marked() {
            let shown: Vec<_> =
                tokens.iter().copied().filter(|token| marked.shows(*token, options)).collect();
            marked.buffer.finish_as(0, &options.tokenizer.decode(&shown, options.marked_options()));
        }
        self.parse_rest();
    }

    /// Whether there is something to take.
    pub fn has_unread(&self) -> bool {
        self.plain.final_text().len() > self.num_taken || self.parsed.has_unread()
    }

    /// Takes the text that was not taken yet, and its content. [`Self::parsed`] has the rest.
    pub fn take(&mut self) -> (Arc<str>, Arc<str>) {
        let whole = self.plain.final_text();
        let start = std::mem::replace(&mut self.num_taken, whole.len());
        let text: Arc<str> = whole[start..].into();
        let content = match self.parsing {
            Some(_) => self.parsed.take_content().into(),
            None if start < self.num_echoed => whole[self.num_echoed..].into(),
            None => Arc::clone(&text),
        };
        (text, content)
    }

    /// The whole text, and its content.
    pub fn whole(&self) -> (Arc<str>, Arc<str>) {
        let text: Arc<str> = self.plain.final_text().into();
        let content = match self.parsing {
            Some(_) => self.parsed.content.as_str().into(),
            None if self.num_echoed > 0 => text[self.num_echoed..].into(),
            None => Arc::clone(&text),
        };
        (text, content)
    }

    fn marked(&mut self) -> Option<(&mut MarkedText, &OutputOptions)> {
        let marked = self.parsing.as_mut()?.marked.as_mut()?;
        Some((marked, &self.options))
    }

    /// Parses the text that has become final.
    fn parse(&mut self) {
        let Some(Parsing { parser, num_read, marked, deltas }) = &mut self.parsing else { return };
        let text = match marked {
            Some(marked) => marked.buffer.final_text(),
            None => &self.plain.final_text()[self.num_echoed..],
        };
        parser.push(&text[*num_read..], deltas);
        *num_read = text.len();
        self.parsed.extend(deltas.drain(..));
    }

    fn parse_rest(&mut self) {
        self.parse();
        if let Some(Parsing { parser, deltas, .. }) = &mut self.parsing {
            parser.finish(deltas);
            self.parsed.extend(deltas.drain(..));
        }
    }
}

impl MarkedText {
    fn push(&mut self, token: u32, held_back: usize, options: &OutputOptions) -> Option<StopMatch> {
        let shown = self.shows(token, options).then_some(token);
        self.buffer.push(shown, held_back)
    }

    fn shows(&self, token: u32, options: &OutputOptions) -> bool {
        self.markers.contains(&token) || !options.is_special(token)
    }
}
