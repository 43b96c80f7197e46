//! `BeamSearch`: a beam search that runs on an engine.
//!
//! Each step starts one request per running beam, which generates one token. The beams' common prefixes are in the
//! prefix cache, so a step computes little more than the new tokens.

use std::sync::Arc;
use std::time::Instant;

use penstock_engine::request::Request;
use penstock_engine::{Engine, Hold, Port, Reservation};
use penstock_text::{TextOptions, TextStream, Tokenizer};

use super::search::{BeamStops, ClosedBeam, Search};
use crate::Error;
use crate::output::{
    Choice, Ending, OutputOptions, RequestOutput, RequestState, StopChecker, StopReason, Timings,
    TopLogprobs, Usage,
};
use crate::params::SamplingParams;

/// A beam search in progress: the caller starts the requests of a step, waits for them, and passes their outputs to
/// [`BeamSearch::advance`].
pub struct BeamSearch {
    engine: Engine,
    /// The memory for the lists of logprobs of all steps; `None` once it is closed.
    reservation: Option<Arc<Reservation>>,
    params: Arc<SamplingParams>,
    step: BeamStep,
    text: BeamText,
    search: Search<BeamStopState>,
    started: Instant,
    /// The output of the first step.
    first: Option<Arc<RequestOutput>>,
}

/// The requests of the steps: the same for every beam except for the prompt.
pub struct BeamStep {
    pub params: SamplingParams,
    /// The request of an empty beam.
    pub request: Request,
    /// A drain lets the search finish, and its adapter stays loaded; `None` once it is closed.
    pub hold: Option<Hold>,
}

/// The text of a beam, and its stop conditions.
struct BeamText {
    tokenizer: Tokenizer,
    options: TextOptions,
    stops: Arc<[String]>,
    /// An empty stream. Its clones share the automaton of the stop strings.
    stream: TextStream,
    checker: StopChecker,
}

/// The progress of a beam in its stop conditions.
#[derive(Clone)]
struct BeamStopState {
    checker: StopChecker,
    stops: Arc<[String]>,
    /// `None` without stop strings.
    stream: Option<TextStream>,
}

impl BeamStops for BeamStopState {
    fn push(&mut self, generated: &[u32]) -> Option<Ending> {
        let (last, index) = (*generated.last()?, generated.len() - 1);
        let stream = self.stream.as_mut().filter(|_| self.checker.adds_text(last, index));
        let stop = stream.and_then(|stream| stream.push(last, &mut String::new()));
        self.checker.check(generated, stop.map(|stop| &*self.stops[stop.stop]))
    }
}

impl BeamText {
    fn stop_state(&self) -> BeamStopState {
        let stream = (!self.stops.is_empty()).then(|| self.stream.clone());
        BeamStopState { checker: self.checker.clone(), stops: Arc::clone(&self.stops), stream }
    }

    /// The text of an output, without its stop string, token or sequence unless those are included.
    fn text(&self, token_ids: &[u32], ending: &Ending) -> String {
        if let Some(StopReason::Text(_)) = &ending.stop_reason {
            let (mut stream, mut text) = (self.stream.clone(), String::new());
            for token in token_ids {
                stream.push(*token, &mut text);
            }
            return text;
        }
        let num_excluded = self.checker.num_excluded(ending.stop_reason.as_ref());
        self.tokenizer.decode(&token_ids[..token_ids.len() - num_excluded], self.options)
    }
}

impl BeamSearch {
    /// A search for the outputs of `request`, whose parameters are `params` with every default filled in.
    pub fn new(
        engine: Engine,
        params: SamplingParams,
        request: Request,
        step: BeamStep,
        output: OutputOptions,
    ) -> Result<Self, Error> {
        let OutputOptions { tokenizer, options, stops, .. } = output;
        let reservation = engine.reserve_output(request.client, request.output_bytes)?;
        let checker = StopChecker::new(Arc::new(request), options.include_stop_str_in_output);
        let stream = TextStream::new(&tokenizer, options, &stops)?;
        let text = BeamText { tokenizer, options, stops: stops.into(), stream, checker };
        let search = Search::new(params.num_beams, params.length_penalty, text.stop_state());
        let (params, started) = (Arc::new(params), Instant::now());
        Ok(Self { reservation, engine, params, step, text, search, started, first: None })
    }

    /// Sets the time by which the search must end: the engine rejects the request of a step that cannot end by then.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.step.request.deadline = deadline;
    }

    /// Whether another step follows.
    pub fn is_running(&self) -> bool {
        self.search.running().len() > 0
    }

    /// No step follows: neither a drain nor the removal of its adapter waits for this search, and its memory is no
    /// longer reserved.
    pub fn close(&mut self) {
        self.step.hold = None;
        self.reservation = None;
    }

    /// The parameters of the step's requests.
    pub fn step_params(&self) -> &SamplingParams {
        &self.step.params
    }

    /// Starts the requests of the next step, one per running beam. If one cannot be started, the others are dropped,
    /// which cancels them.
    pub fn start_step(&self, port: &Port) -> Result<Vec<RequestState>, Error> {
        self.search.running().map(|beam| self.start(&beam.token_ids, port)).collect()
    }

    fn start(&self, token_ids: &[u32], port: &Port) -> Result<RequestState, Error> {
        let mut request = self.step.request.clone();
        request.min_tokens = usize::from(token_ids.len() < self.params.min_tokens);
        request.prompt = self.step.request.prompt.iter().chain(token_ids).copied().collect();
        let output = OutputOptions {
            tokenizer: self.text.tokenizer.clone(),
            options: self.text.options,
            stops: Vec::new(),
            sequences: Vec::new(),
            echo: None,
            adapter: self.params.adapter.clone(),
            formats: None,
        };
        RequestState::start(&self.engine, Arc::new(request), 1, output, port)
    }

    /// Takes the outputs of the step's requests, in their order.
    pub fn advance(&mut self, outputs: &[Arc<RequestOutput>]) {
        self.first = self.first.take().or_else(|| outputs.first().cloned());
        let choices = || outputs.iter().filter_map(|output| output.choices.first());
        let interruption = choices().find_map(|choice| match choice.finish_reason.as_str() {
            "cancelled" => Some("cancelled"),
            "interrupted" => Some("interrupted"),
            "unread" => Some("unread"),
            _ => None,
        });
        match interruption {
            Some(reason) => self.search.interrupt(reason),
            None => self.search.advance(choices().map(|choice| most_likely(choice)).collect()),
        }
    }

    /// The best outputs, best first; fewer than `n` if the search found fewer.
    pub fn result(&self) -> RequestOutput {
        let first = self.first.as_deref().expect("a search that has ended has made a step; this is a bug");
        let outputs = &self.search.closed()[..self.params.n.min(self.search.closed().len())];
        let choice = |(index, output)| Arc::new(self.choice(index, output));
        let completion_tokens = outputs.iter().map(|output| output.beam.token_ids.len()).sum();
        RequestOutput {
            choices: outputs.iter().enumerate().map(choice).collect(),
            prompt_token_ids: Arc::clone(&first.prompt_token_ids),
            prompt_logprobs: None,
            prompt_top_logprobs: None,
            adapter: self.params.adapter.clone(),
            usage: Usage { completion_tokens, ..first.usage.clone() },
            timings: Timings { total: self.started.elapsed().as_secs_f64(), ..first.timings.clone() },
        }
    }

    fn choice(&self, index: usize, output: &ClosedBeam) -> Choice {
        let ClosedBeam { beam, score, ending } = output;
        let text: Arc<str> = self.text.text(&beam.token_ids, ending).into();
        let has_logprobs = self.params.logprobs;
        let top_logprobs = self.params.top_logprobs.map(|count| {
            let shortened = |top: &Arc<TopLogprobs>| top.iter().take(count as usize).copied().collect();
            beam.tops().iter().map(shortened).collect()
        });
        Choice {
            index,
            text: Arc::clone(&text),
            token_ids: beam.token_ids.clone(),
            logprobs: has_logprobs.then(|| beam.logprobs()),
            top_logprobs,
            cumulative_logprob: has_logprobs.then_some(beam.total),
            finish_reason: ending.finish_reason.to_owned(),
            stop_reason: ending.stop_reason.clone(),
            seed: 0, // nothing is sampled
            score: Some(*score),
            content: text,
            reasoning: "".into(),
            tool_calls: Vec::new(),
            logits: None,
            hidden_states: None,
            embeddings: None,
        }
    }
}

/// The most likely tokens after the prompt of a step's request.
fn most_likely(choice: &Choice) -> TopLogprobs {
    choice.top_logprobs.as_ref().and_then(|tops| tops.first()).cloned().unwrap_or_default()
}
