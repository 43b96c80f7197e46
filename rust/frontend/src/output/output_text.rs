//! The text of one choice, and its content, reasoning and tool calls if it is parsed.
//!
//! ```text
//! tokens ── plain ─────────────────────────────────> text
//!        └─ marked, or the plain text ── parser ───> content, reasoning, tool calls
//! ```
//!
//! A second text exists only if the parser uses special tokens that the first one omits. Stop strings are searched in
//! both; the first one found ends both.

use std::sync::Arc;

use penstock_text::parsers::{Delta, OutputParser, ReasoningFormat, ToolFormat};
use penstock_text::{StopMatch, StopSequences, TextError, TextOptions, TextStream, Tokenizer};

use super::text_buffer::TextBuffer;
use super::token_output::TokenOutput;

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
#[derive(Clone, Copy)]
pub struct OutputFormats {
    /// The reasoning format, and whether the prompt opens the reasoning.
    pub reasoning: Option<(ReasoningFormat, bool)>,
    pub tools: Option<ToolFormat>,
    /// Whether text after the first call is content.
    pub one_call: bool,
    /// Whether the answer consists of calls.
    pub requires_call: bool,
}

/// The text of one choice.
pub struct OutputText {
    options: Arc<OutputOptions>,
    /// The prompt's text, if the text begins with it.
    echo: Option<Arc<str>>,
    sequences: StopSequences,
    plain: TextBuffer,
    parsing: Option<Parsing>,
}

struct Parsing {
    parser: OutputParser,
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
        let parser = |OutputFormats { reasoning, tools, one_call, requires_call }| {
            let parser = OutputParser::new(reasoning, tools);
            let parser = if one_call { parser.with_one_call() } else { parser };
            if requires_call { parser.with_required_call() } else { parser }
        };
        let parsing = |formats| Parsing {
            parser: parser(formats),
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
            parsing: options.formats.map(parsing),
            options: Arc::clone(&options),
        };
        Ok((0..count).map(text).collect())
    }

    /// Special tokens that the parser uses and the text omits.
    fn markers(&self) -> Vec<u32> {
        let Some(formats) = self.formats.filter(|_| self.options.skip_special_tokens) else {
            return Vec::new();
        };
        let reasoning = formats.reasoning.map_or(&[][..], |(format, _)| format.markers());
        let markers = reasoning.iter().chain(formats.tools.map_or(&[][..], ToolFormat::markers));
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
    /// Whether the text is parsed.
    pub fn is_parsed(&self) -> bool {
        self.parsing.is_some()
    }

    /// Whether stop strings, tokens and sequences are part of the text.
    pub fn includes_stops(&self) -> bool {
        self.options.options.include_stop_str_in_output
    }

    /// Puts the prompt's text first, if requested. Called before the first token and before the end.
    pub fn begin(&self, output: &mut TokenOutput) {
        if let Some(echo) = self.echo.as_deref().filter(|_| output.token_ids.is_empty()) {
            output.text = echo.to_owned();
            output.echoed = echo.len();
        }
    }

    /// Adds a token. Returns the stop string that ended the text, if any; then no token follows.
    pub fn push(&mut self, token: u32, output: &mut TokenOutput) -> Option<&str> {
        let held_back = self.sequences.push(token);
        let stop = self.plain.push(Some(token), held_back);
        let marked = self.parsing.as_mut().and_then(|parsing| parsing.marked.as_mut());
        let stop = stop.or(marked.and_then(|marked| marked.push(token, held_back, &self.options)));
        if stop.is_some() {
            return self.finish(output);
        }
        self.emit(output);
        None
    }

    /// Ends the text. The text that was held back may complete a stop string.
    pub fn finish(&mut self, output: &mut TokenOutput) -> Option<&str> {
        let stop = self.plain.finish();
        let marked = self.parsing.as_mut().and_then(|parsing| parsing.marked.as_mut());
        let stop = stop.or(marked.and_then(|marked| marked.buffer.finish()));
        self.emit_rest(output);
        stop.map(|StopMatch { stop }| &*self.options.stops[stop])
    }

    /// Ends the text without the last `num_stopping` tokens, which are a stop sequence.
    pub fn finish_without(&mut self, num_stopping: usize, output: &mut TokenOutput) {
        let options = &self.options;
        let tokens = &output.token_ids[..output.token_ids.len() - num_stopping];
        let (before, num_echoed) = match (&options.echo, &self.echo) {
            (Some(Echo::Tokens(ids)), Some(echo)) => (&ids[..], echo.len()),
            _ => (&[][..], 0),
        };
        let whole = options.tokenizer.decode(&[before, tokens].concat(), options.options);
        self.plain.finish_as(&whole[num_echoed..]);
        if let Some(marked) = self.parsing.as_mut().and_then(|parsing| parsing.marked.as_mut()) {
            let shown: Vec<_> =
                tokens.iter().copied().filter(|token| marked.shows(*token, options)).collect();
            marked.buffer.finish_as(&options.tokenizer.decode(&shown, options.marked_options()));
        }
        self.emit_rest(output);
    }

    /// Moves final text to `output`.
    fn emit(&mut self, output: &mut TokenOutput) {
        let text = self.plain.take();
        if let Some(Parsing { parser, marked, deltas }) = &mut self.parsing {
            match marked {
                Some(marked) => parser.push(&marked.buffer.take(), deltas),
                None => parser.push(&text, deltas),
            }
            output.parsed.extend(deltas.drain(..));
        }
        output.extend_text(text);
    }

    fn emit_rest(&mut self, output: &mut TokenOutput) {
        self.emit(output);
        if let Some(Parsing { parser, deltas, .. }) = &mut self.parsing {
            parser.finish(deltas);
            output.parsed.extend(deltas.drain(..));
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
