//! An engine whose executor asks a function for the next token's log probabilities, and a byte-level tokenizer.

use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use penstock_checkpoint::{GgufVocabulary, TokenType, TokenizerSource};
use penstock_engine::request::{PromptPosition, Request};
use penstock_engine::{
    Completions, Engine, Executor, Limits, Port, RowOutput, StepDone, StepOutput, StepPlan,
};
use penstock_frontend::Error;
use penstock_frontend::adapters::Adapters;
use penstock_frontend::output::{Milestone, RequestOutput, RequestState};
use penstock_frontend::params::SamplingParams;
use penstock_frontend::prompt::{Frontend, Grammars, Mode, ModelFormats, Prompt};
use penstock_text::Tokenizer;
use penstock_types::{Auto, GenerationConfig, ReasoningParser, ToolParser};
use penstock_types::{Token, TokenDetails};

/// The model's end token. The ids below are the bytes.
pub const END: u32 = 256;
/// A special token.
pub const THINK: u32 = 257;
pub const VOCABULARY_SIZE: usize = 259;

type Model = dyn Fn(&Request, &[u32]) -> Vec<f32> + Send + Sync;

/// A front end, and the requests that reached the executor.
pub struct Setup {
    pub frontend: Frontend,
    pub requests: Arc<Mutex<Vec<Arc<Request>>>>,
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.frontend.engine.shutdown();
    }
}

/// A front end whose model returns log probabilities for a request and the tokens generated for it.
pub fn with_model(model: impl Fn(&Request, &[u32]) -> Vec<f32> + Send + Sync + 'static) -> Setup {
    with_limits(|_| {}, model)
}

/// The same with other limits.
pub fn with_limits(
    change: impl FnOnce(&mut Limits),
    model: impl Fn(&Request, &[u32]) -> Vec<f32> + Send + Sync + 'static,
) -> Setup {
    let mut limits = Limits {
        max_model_len: 256,
        max_num_seqs: 32,
        max_num_batched_tokens: 64,
        max_waiting: 64,
        max_paused: 64,
        block_size: 16,
        num_blocks: 128,
        vocabulary_size: VOCABULARY_SIZE,
        queue_capacity: 8,
        prefix_cache_ttl: Some(Duration::from_secs(300)),
        host_prefixes: false,
        ..Limits::small()
    };
    change(&mut limits);
    penstock_engine::check_when_idle();
    let requests = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&requests);
    let engine = Engine::start(limits, move |completions| {
        Box::new(Scripted::start(completions, Arc::new(model), seen))
    });
    let frontend = Frontend {
        engine: engine.unwrap(),
        tokenizer: tokenizer(),
        formats: ModelFormats::new(
            Auto(Some(ReasoningParser::Think)),
            Auto(Some(ToolParser::Hermes)),
            [].iter(),
        ),
        grammars: Grammars::default(),
        adapters: Adapters::default(),
        generation: GenerationConfig { eos_token_ids: vec![END], ..GenerationConfig::default() },
        hidden_size: 4,
        max_logprobs: 20,
    };
    Setup { frontend, requests }
}

/// A front end whose model generates these tokens, then end tokens.
pub fn saying(script: impl Into<Vec<u32>>) -> Setup {
    let script = script.into();
    with_model(move |_, generated| only(*script.get(generated.len()).unwrap_or(&END)))
}

/// The tokens of a text.
pub fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The distribution of a certain token.
pub fn only(token: u32) -> Vec<f32> {
    let mut logprobs = vec![f32::NEG_INFINITY; VOCABULARY_SIZE];
    logprobs[token as usize] = 0.0;
    logprobs
}

/// The bytes, `<|end|>`, `<think>`, and one merged token, because a vocabulary of this kind has merges.
fn tokenizer() -> Tokenizer {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    let byte = |byte| {
        let code = if printable(byte) { byte } else { next };
        next += u32::from(!printable(byte));
        char::from_u32(code).unwrap().to_string()
    };
    let mut tokens: Vec<String> = (0..256).map(byte).collect();
    tokens.extend(["<|end|>", "<think>", "zq"].map(String::from));
    let mut types = vec![TokenType::Normal; 256];
    types.extend([TokenType::Control, TokenType::Control, TokenType::Normal]);
    let vocabulary = GgufVocabulary {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        tokens,
        scores: Vec::new(),
        types,
        merges: vec!["z q".to_owned()],
        bos: Some(END),
        eos: Some(END),
        unk: None,
        pad: None,
        add_bos: None,
        add_eos: None,
        add_space_prefix: None,
    };
    Tokenizer::new(&TokenizerSource::Gguf(vocabulary)).unwrap()
}

impl Setup {
    /// Starts a request for a text.
    pub fn start(
        &self,
        prompt: &str,
        params: &SamplingParams,
        mode: Mode,
        port: &Port,
    ) -> Result<RequestState, Error> {
        let prepared = self.frontend.prepare(params, Prompt::Text(prompt.to_owned()), mode, &mut || true)?;
        prepared.start(Vec::new(), &self.frontend, port)
    }

    /// The complete output of a request.
    pub fn run(&self, prompt: &str, params: &SamplingParams, mode: Mode) -> RequestOutput {
        let port = Port::with_condvar();
        let state = self.start(prompt, params, mode, &port).unwrap();
        wait(&state, Milestone::End, &port);
        state.result().unwrap()
    }

    /// The complete output of a completion.
    pub fn generate(&self, params: &SamplingParams) -> RequestOutput {
        self.run("abc", params, Mode::Completion)
    }
}

/// Waits until a request has reached a milestone.
pub fn wait(state: &RequestState, milestone: Milestone, port: &Port) {
    while !state.wait_for(milestone) {
        port.wait(Some(Duration::from_secs(10)));
        port.clear();
    }
}

/// Computes steps on a thread: greedy sampling from the model's distribution.
struct Scripted(Sender<(Box<StepPlan>, Box<StepOutput>)>);

impl Scripted {
    fn start(completions: Completions, model: Arc<Model>, requests: Arc<Mutex<Vec<Arc<Request>>>>) -> Self {
        let (sender, steps) = channel::<(Box<StepPlan>, Box<StepOutput>)>();
        thread::spawn(move || {
            let mut slots = HashMap::new();
            for (plan, mut output) in steps {
                for sequence in &plan.new_sequences {
                    let request = Arc::new(sequence.request.of_choice(sequence.choice));
                    requests.lock().unwrap().push(Arc::clone(&request));
                    let generated = sequence.generated.start as usize..sequence.generated.end as usize;
                    let generated = plan.tokens[generated].to_vec();
                    slots.insert(sequence.slot, (request, generated));
                }
                compute(&plan, &mut output, &mut slots, &*model);
                completions.send(StepDone { plan, output, result: Ok(()) });
            }
        });
        Self(sender)
    }
}

impl Executor for Scripted {
    fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
        self.0.send((plan, output)).unwrap();
    }
}

fn compute(
    plan: &StepPlan,
    output: &mut StepOutput,
    slots: &mut HashMap<u32, (Arc<Request>, Vec<u32>)>,
    model: &Model,
) {
    output.copies_done = true;
    for row in &plan.rows {
        let (request, generated) = slots.get_mut(&row.slot).unwrap();
        let position = |position| PromptPosition { logprob: -0.5 * (position as f32 + 1.0), details: None };
        output.positions.extend(row.prompt_outputs.clone().map(position));
        if row.sample.is_some() {
            let token = sample(request, generated, model);
            generated.push(token.id);
            output.sampled.push(token);
        }
        output.rows.push(RowOutput {
            num_tokens: u32::from(row.sample.is_some()),
            num_positions: row.prompt_outputs.len() as u32,
            ..RowOutput::default()
        });
    }
}

fn sample(request: &Request, generated: &[u32], model: &Model) -> Token {
    let mut logprobs = model(request, generated);
    if generated.len() < request.min_tokens {
        request.stop_token_ids.iter().for_each(|id| logprobs[*id as usize] = f32::NEG_INFINITY);
    }
    let mut top: Vec<(u32, f32)> = (0..).zip(logprobs).collect();
    top.sort_by(|one, other| other.1.total_cmp(&one.1));
    top.retain(|(_, logprob)| *logprob > f32::NEG_INFINITY);
    let (id, logprob) = top[0];
    top.truncate(request.outputs.logprobs.unwrap_or(0) as usize);
    Token { id, logprob, details: Some(Box::new(TokenDetails { top, ..TokenDetails::default() })) }
}
