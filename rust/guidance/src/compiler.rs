//! Compiles on threads of its own, so that whoever asks can give up.
//!
//! The library cannot be interrupted. A compilation that overruns its time goes on, and takes its thread with it until
//! the library's own limits end it; its result is kept, so a later request may find it. Whoever asks for the same
//! grammar in the meantime waits for that compilation and takes no second thread. What nobody waits for any more before
//! a thread has taken it is never compiled.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::build::Builder;
use crate::cache::Cache;
use crate::library;
use crate::{Compiled, Grammar, GuidanceError, Limits, Vocabulary};

/// Stack of a thread that compiles; [`Limits::recursion`] keeps the library within it. Only what is used is ever
/// taken from the system.
pub(crate) const STACK_BYTES: usize = 256 << 20;

/// How often somebody who waits is asked whether to go on.
const ASKING_INTERVAL: Duration = Duration::from_millis(50);

/// Compiles grammars for one vocabulary and keeps them.
///
/// To be shared between threads. Dropping it ends its threads, each when it is done with what it does.
pub struct Compiler {
    shared: Arc<Shared>,
}

struct Shared {
    builder: Builder,
    limits: Limits,
    state: Mutex<State>,
    /// Rung for the threads when there is work, or no more ever.
    work: Condvar,
    /// Rung for the callers when a result is there.
    done: Condvar,
}

struct State {
    cache: Cache,
    jobs: HashMap<Arc<Grammar>, Job>,
    /// Jobs that no thread has taken yet.
    queue: VecDeque<Arc<Grammar>>,
    workers: usize,
    idle: usize,
    closed: bool,
}

/// A grammar that is asked for and not compiled yet.
struct Job {
    waiting: usize,
    /// When a thread took it.
    started: Option<Instant>,
    result: Option<Result<Arc<Compiled>, GuidanceError>>,
}

/// What a compiler holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Compiled grammars.
    pub grammars: usize,
    /// Their bytes, estimated.
    pub bytes: usize,
}

impl Compiler {
    /// A compiler without threads; they start when needed. Preparing the vocabulary takes a second or so for 150,000
    /// tokens.
    ///
    /// # Errors
    /// [`GuidanceError::Vocabulary`] if the library cannot work with it.
    pub fn new(vocabulary: Arc<Vocabulary>, limits: Limits) -> Result<Self, GuidanceError> {
        let builder = Builder::new(vocabulary, limits.clone())?;
        let state = State {
            cache: Cache::new(limits.cached_grammars, limits.cached_bytes),
            jobs: HashMap::new(),
            queue: VecDeque::new(),
            workers: 0,
            idle: 0,
            closed: false,
        };
        let (work, done) = (Condvar::new(), Condvar::new());
        Ok(Self { shared: Arc::new(Shared { builder, limits, state: Mutex::new(state), work, done }) })
    }

    /// The grammar, compiled now, before, or by whoever else asks for it at the same time. Blocks until then, so it is
    /// not for a thread that others wait for.
    ///
    /// # Errors
    /// [`GuidanceError::Invalid`], [`GuidanceError::TooComplex`] and [`GuidanceError::DeadEnd`] say what is wrong with
    /// the grammar, [`GuidanceError::TimedOut`] that compiling it took too long, [`GuidanceError::Overloaded`] that too
    /// many others come first, [`GuidanceError::Library`] that the library failed.
    pub fn compile(&self, grammar: &Grammar) -> Result<Arc<Compiled>, GuidanceError> {
        self.compile_while(grammar, || true)
    }

    /// Likewise, for as long as `is_wanted` says so, which is asked now and then while there is nothing yet.
    ///
    /// # Errors
    /// As [`compile`](Self::compile), and [`GuidanceError::Abandoned`].
    pub fn compile_while(
        &self,
        grammar: &Grammar,
        is_wanted: impl FnMut() -> bool,
    ) -> Result<Arc<Compiled>, GuidanceError> {
        let shared = &self.shared;
        let mut state = shared.lock();
        if let Some(compiled) = state.cache.get(grammar) {
            return Ok(compiled);
        }
        let key = state.jobs.get_key_value(grammar).map(|(key, _)| Arc::clone(key));
        let key = key.unwrap_or_else(|| Arc::new(grammar.clone()));
        if !state.jobs.contains_key(&key) {
            let (limit, what) = (shared.limits.queued_grammars, grammar.kind());
            if state.queue.len() >= limit {
                let reason = format!("{limit} other grammars wait for it, and no more may");
                return Err(GuidanceError::Overloaded { what, reason });
            }
            Shared::provide_worker(shared, &mut state).map_err(|reason| GuidanceError::Library {
                what,
                reason: format!("no thread to compile on: {reason}"),
            })?;
            state.jobs.insert(Arc::clone(&key), Job { waiting: 0, started: None, result: None });
            state.queue.push_back(Arc::clone(&key));
            shared.work.notify_one();
        }
        shared.wait(state, &key, is_wanted)
    }

    /// What is kept.
    pub fn cache_use(&self) -> CacheUse {
        let state = self.shared.lock();
        CacheUse { grammars: state.cache.len(), bytes: state.cache.bytes() }
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    /// A panic while the lock is held leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread if none is idle and there may be one more.
    fn provide_worker(shared: &Arc<Self>, state: &mut State) -> std::io::Result<()> {
        let enough = state.idle > state.queue.len() || state.workers >= shared.limits.workers.max(1);
        if enough {
            return Ok(());
        }
        let worker = Arc::clone(shared);
        let builder = thread::Builder::new().name("penstock-guidance".into()).stack_size(STACK_BYTES);
        match builder.spawn(move || worker.work()) {
            Ok(_) => state.workers += 1,
            Err(error) if state.workers == 0 => return Err(error),
            Err(_) => {}
        }
        Ok(())
    }

    /// What a thread does all its life.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            let Some(grammar) = state.queue.pop_front() else {
                if state.closed {
                    return;
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            state.job(&grammar).started = Some(Instant::now());
            drop(state);
            let result = library::call(|| self.builder.build(&grammar))
                .unwrap_or_else(|reason| Err(GuidanceError::Library { what: grammar.kind(), reason }))
                .map(Arc::new);
            state = self.lock();
            if let Ok(compiled) = &result {
                state.cache.insert(Arc::clone(&grammar), Arc::clone(compiled));
            }
            let job = state.job(&grammar);
            if job.waiting == 0 {
                state.jobs.remove(&grammar);
            } else {
                job.result = Some(result);
                self.done.notify_all();
            }
        }
    }

    /// Waits for the result of a job. The last one to leave takes the job away, unless a thread is at work on it.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        grammar: &Arc<Grammar>,
        mut is_wanted: impl FnMut() -> bool,
    ) -> Result<Arc<Compiled>, GuidanceError> {
        let begin = Instant::now();
        state.job(grammar).waiting += 1;
        let result = loop {
            let job = state.job(grammar);
            if let Some(result) = job.result.clone() {
                break result;
            }
            let Some(rest) = self.limits.compile_time.checked_sub(job.since(begin).elapsed()) else {
                break Err(self.overrun(grammar, job));
            };
            let rest = rest.min(ASKING_INTERVAL);
            let (waited, timeout) =
                self.done.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner);
            state = waited;
            if timeout.timed_out() {
                // Whoever is asked may wait for others, who must not wait for this lock.
                drop(state);
                let goes_on = is_wanted();
                state = self.lock();
                if !goes_on {
                    break Err(GuidanceError::Abandoned { what: grammar.kind() });
                }
            }
        };
        let job = state.job(grammar);
        job.waiting -= 1;
        if job.waiting == 0 && (job.result.is_some() || job.started.is_none()) {
            state.jobs.remove(grammar);
            state.queue.retain(|queued| queued != grammar);
        }
        result
    }

    /// What a time limit that has passed says of a job: of its grammar only where that is what took the time.
    fn overrun(&self, grammar: &Grammar, job: &Job) -> GuidanceError {
        let (what, limit) = (grammar.kind(), self.limits.compile_time);
        if job.started.is_some() {
            return GuidanceError::TimedOut { what, limit };
        }
        let reason = format!("all threads were at work on other grammars for {limit:?}");
        GuidanceError::Overloaded { what, reason }
    }
}

impl Job {
    /// What the time limit of somebody who waits since `begin` counts from: compiling has one of its own.
    fn since(&self, begin: Instant) -> Instant {
        self.started.map_or(begin, |started| started.max(begin))
    }
}

impl State {
    fn job(&mut self, grammar: &Arc<Grammar>) -> &mut Job {
        self.jobs.get_mut(grammar).expect("a job stays while it is waited for or worked on; this is a bug")
    }
}
