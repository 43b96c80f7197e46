//! Structured output: the grammar of a request, compiled for the model's vocabulary, as the engine's grammar.
//!
//! The first request with a grammar builds the token table and starts the compiler on its own thread; other requests do
//! not wait for it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use penstock_engine::request::{Grammar as EngineGrammar, GrammarState};
use penstock_guidance::{
    Caller, CompiledGrammar, GrammarCompiler, GrammarMatcher, GrammarSpec, GuidanceError, GuidanceLimits,
    TokenText, Vocabulary,
};
use penstock_text::Tokenizer;

use crate::params::ModelLimits;

/// The compiler and its vocabulary; empty until the first request with a grammar.
pub type Compiler = OnceLock<Result<(GrammarCompiler, Arc<Vocabulary>), GuidanceError>>;

/// The grammar compiler of one engine, until the engine is closed.
pub struct Grammars(Mutex<Option<Arc<Compiler>>>);

impl Default for Grammars {
    fn default() -> Self {
        Self(Mutex::new(Some(Arc::default())))
    }
}

impl Grammars {
    /// Refuses further compilations, tells the threads to end and frees the cache, which can take a moment.
    pub fn close(&self) {
        let compiler = self.lock().take();
        drop(compiler); // after the lock
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Compiler>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles a grammar; can take seconds, and ends early when it is no longer wanted. `None` if the engine is
    /// closed. `stop_ids` are the stop token ids of the request.
    pub fn compile(
        &self,
        grammar: &GrammarSpec,
        tokenizer: &Tokenizer,
        model: &ModelLimits<'_>,
        stop_ids: &[u32],
        caller: &mut dyn Caller,
    ) -> Option<Result<Arc<dyn EngineGrammar>, GuidanceError>> {
        let compiler = self.lock().clone()?;
        let start = || {
            let vocabulary = Arc::new(vocabulary(tokenizer, model)?);
            Ok((GrammarCompiler::new(Arc::clone(&vocabulary), GuidanceLimits::default())?, vocabulary))
        };
        let started = compiler.get_or_init(start).as_ref().map_err(Clone::clone);
        Some(started.and_then(|(compiler, vocabulary)| {
            let compiled = compiler.compile_for(grammar, caller)?;
            let vocabulary = Arc::clone(vocabulary);
            Ok(Arc::new(RequestGrammar { compiled, vocabulary, stop_ids: stop_ids.into() })
                as Arc<dyn EngineGrammar>)
        }))
    }
}

fn vocabulary(tokenizer: &Tokenizer, model: &ModelLimits<'_>) -> Result<Vocabulary, GuidanceError> {
    if !tokenizer.has_token_bytes() {
        let reason = "its tokens are words whose text depends on their neighbours".to_owned();
        return Err(GuidanceError::Vocabulary { reason });
    }
    let text = |id| {
        let token = tokenizer.token_bytes(id)?;
        Some(TokenText { bytes: token.bytes.to_vec(), special: token.special })
    };
    let tokens = (0..model.vocabulary_size as u32).map(text).collect();
    let tokenizer = tokenizer.clone();
    // A text that cannot be encoded is split without the tokenizer.
    let encode = move |text: &str| tokenizer.encode(text, false).unwrap_or_default();
    Vocabulary::new(tokens, &model.end_ids().collect::<Vec<_>>(), Arc::new(encode))
}

/// The grammar of one request.
struct RequestGrammar {
    compiled: Arc<CompiledGrammar>,
    vocabulary: Arc<Vocabulary>,
    /// The token ids that are allowed wherever the text may end.
    stop_ids: Arc<[u32]>,
}

impl fmt::Debug for RequestGrammar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RequestGrammar").field("stop_ids", &self.stop_ids).finish_non_exhaustive()
    }
}

impl EngineGrammar for RequestGrammar {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        let matcher = self.compiled.start().map_err(|error| error.to_string())?;
        let (vocabulary, stop_ids) = (Arc::clone(&self.vocabulary), Arc::clone(&self.stop_ids));
        Ok(Box::new(SequenceMatcher { matcher, vocabulary, stop_ids }))
    }

    fn start_bytes(&self) -> usize {
        self.compiled.start_bytes()
    }
}

/// The state of one sequence in its grammar.
struct SequenceMatcher {
    matcher: GrammarMatcher,
    vocabulary: Arc<Vocabulary>,
    stop_ids: Arc<[u32]>,
}

impl GrammarState for SequenceMatcher {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.matcher.mask(allowed).map_err(|error| error.to_string())?;
        let (word, bit) = (|id: u32| id as usize / 32, |id: u32| 1_u32 << (id % 32));
        let end_ids = self.vocabulary.end_ids();
        if end_ids.iter().any(|id| allowed[word(*id)] & bit(*id) != 0) {
            // The request may have other end tokens than the model.
            end_ids.iter().for_each(|id| allowed[word(*id)] &= !bit(*id));
            self.stop_ids.iter().for_each(|id| allowed[word(*id)] |= bit(*id));
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.matcher.accept(token).map_err(|error| error.to_string())
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) {
        self.matcher.forced_tokens(tokens);
    }

    fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
        let matcher = self.matcher.fork().map_err(|error| error.to_string())?;
        let (vocabulary, stop_ids) = (Arc::clone(&self.vocabulary), Arc::clone(&self.stop_ids));
        Ok(Box::new(Self { matcher, vocabulary, stop_ids }))
    }
}
