//! Compilation on worker threads, so that callers can stop waiting.
//!
//! Compilation in the library cannot be interrupted, except for the first mask (`watchdog.rs`). A compilation that exceeds
//! its time limit keeps its thread until the limits on its work end it; its result is cached for later requests. Meanwhile its client gets no other grammar,
//! and another thread serves those of other clients. Callers that ask for the same grammar in the meantime wait for the
//! same compilation. A queued grammar without callers is removed from the queue. The clients of the queue take turns, and
//! one grammar of a client is compiled at a time, so that many grammars of one do not delay those of another.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::builder::GrammarBuilder;
use crate::cache::GrammarCache;
use crate::library;
use crate::turns::Turns;
use crate::{CompiledGrammar, GrammarSpec, GuidanceError, GuidanceLimits, Vocabulary};

/// Stack size of a worker thread, in bytes. [`GuidanceLimits::recursion`] keeps the library within it. The system
/// commits only the pages in use.
const STACK_BYTES: usize = 256 << 20;

/// Interval at which a waiting caller is asked whether to continue.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The caller of a compilation.
pub trait Caller {
    /// The client that the caller works for. Callers without one are one client.
    fn client(&self) -> Option<u64> {
        None
    }

    /// Called before the caller waits for another thread, and not if the grammar is cached. It does not wait if this
    /// returns false.
    fn begin_wait(&mut self) -> bool {
        true
    }

    /// Whether the result is still wanted. Called at intervals while there is no result.
    fn is_wanted(&mut self) -> bool;
}

impl<F: FnMut() -> bool> Caller for F {
    fn is_wanted(&mut self) -> bool {
        self()
    }
}

/// Compiles grammars for one vocabulary and caches them.
///
/// It is shared between threads. Its worker threads end after it is dropped, each when its current compilation is done.
pub struct GrammarCompiler {
    workers: Arc<CompileWorkers>,
}

struct CompileWorkers {
    builder: GrammarBuilder,
    limits: GuidanceLimits,
    queue: Mutex<CompileQueue>,
    /// Signals workers: a job is pending, or the compiler is closed.
    job_added: Condvar,
    /// Signals callers: a result is available.
    job_done: Condvar,
}

struct CompileQueue {
    cache: GrammarCache,
    jobs: HashMap<Arc<GrammarSpec>, CompileJob>,
    /// Jobs that no worker has started, by client.
    pending: Turns<Arc<GrammarSpec>>,
    num_workers: usize,
    num_idle: usize,
    closed: bool,
}

/// A requested grammar without a result in the cache.
struct CompileJob {
    /// The client that asked first.
    client: Option<u64>,
    num_callers: usize,
    started: Option<Instant>,
    result: Option<Result<Arc<CompiledGrammar>, GuidanceError>>,
}

/// Size of a compiler's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUsage {
    /// Number of compiled grammars.
    pub grammars: usize,
    /// Their estimated size, in bytes.
    pub bytes: usize,
}

impl GrammarCompiler {
    /// Creates a compiler. Worker threads start on demand. Indexing a vocabulary of 150,000 tokens takes about a
    /// second.
    ///
    /// # Errors
    /// [`GuidanceError::Vocabulary`] if the library cannot use the vocabulary.
    pub fn new(vocabulary: Arc<Vocabulary>, limits: GuidanceLimits) -> Result<Self, GuidanceError> {
        let builder = GrammarBuilder::new(vocabulary, limits.clone())?;
        let queue = Mutex::new(CompileQueue {
            cache: GrammarCache::new(limits.cached_grammars, limits.cached_bytes),
            jobs: HashMap::new(),
            pending: Turns::default(),
            num_workers: 0,
            num_idle: 0,
            closed: false,
        });
        let (job_added, job_done) = (Condvar::new(), Condvar::new());
        Ok(Self { workers: Arc::new(CompileWorkers { builder, limits, queue, job_added, job_done }) })
    }

    /// Returns the compiled grammar, from the cache if it is there. Concurrent calls with the same grammar share one
    /// compilation. Blocks until the result is available.
    ///
    /// # Errors
    /// [`GuidanceError::Invalid`], [`GuidanceError::TooComplex`] and [`GuidanceError::DeadEnd`] if the grammar is not
    /// usable, [`GuidanceError::TimedOut`] if compilation takes too long, [`GuidanceError::Overloaded`] if too many
    /// other grammars are queued, [`GuidanceError::Library`] if the library fails.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GuidanceError> {
        self.compile_for(spec, &mut || true)
    }

    /// Like [`compile`](Self::compile), for a caller that can stop waiting.
    ///
    /// # Errors
    /// Those of [`compile`](Self::compile), and [`GuidanceError::Cancelled`].
    pub fn compile_for(
        &self,
        spec: &GrammarSpec,
        caller: &mut dyn Caller,
    ) -> Result<Arc<CompiledGrammar>, GuidanceError> {
        let workers = &self.workers;
        if let Some(compiled) = workers.lock().cache.get(spec) {
            return compiled.check().map(|()| compiled);
        }
        if !caller.begin_wait() {
            return Err(GuidanceError::Cancelled { kind: spec.kind() });
        }
        let mut queue = workers.lock();
        if let Some(compiled) = queue.cache.get(spec) {
            return Ok(compiled);
        }
        let key = queue.jobs.get_key_value(spec).map(|(key, _)| Arc::clone(key));
        let key = key.unwrap_or_else(|| Arc::new(spec.clone()));
        if !queue.jobs.contains_key(&key) {
            let (limits, kind, client) = (&workers.limits, spec.kind(), caller.client());
            let overloaded = |reason| GuidanceError::Overloaded { kind, reason };
            let has_late = |job: &CompileJob| job.client == client && job.is_late(limits.compile_time);
            if client.is_some() && queue.jobs.values().any(has_late) {
                let reason = format!("an earlier grammar of the client has taken {:?}", limits.compile_time);
                return Err(overloaded(format!("{reason} and is not compiled yet")));
            }
            if queue.pending.len() >= limits.queued_grammars {
                let limit = limits.queued_grammars;
                return Err(overloaded(format!("the queue is full, with {limit} other grammars")));
            }
            CompileWorkers::ensure_worker(workers, &mut queue)
                .map_err(|error| overloaded(format!("cannot start a thread: {error}")))?;
            let job = CompileJob { client, num_callers: 0, started: None, result: None };
            queue.jobs.insert(Arc::clone(&key), job);
            queue.pending.push(client, Arc::clone(&key));
            workers.job_added.notify_one();
        }
        workers.wait(queue, &key, caller)
    }

    /// The size of the cache.
    pub fn cache_usage(&self) -> CacheUsage {
        let queue = self.workers.lock();
        CacheUsage { grammars: queue.cache.len(), bytes: queue.cache.bytes() }
    }
}

impl Drop for GrammarCompiler {
    fn drop(&mut self) {
        self.workers.lock().closed = true;
        self.workers.job_added.notify_all();
    }
}

impl CompileWorkers {
    /// Ignores poisoning: a panic while the lock is held leaves the queue consistent.
    fn lock(&self) -> MutexGuard<'_, CompileQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread if none is idle and the limit allows one more. Late compilations do not count, up to the limit.
    fn ensure_worker(workers: &Arc<Self>, queue: &mut CompileQueue) -> std::io::Result<()> {
        let has_idle = queue.num_idle > queue.pending.len();
        let limits = &workers.limits;
        let num_late = queue.jobs.values().filter(|job| job.is_late(limits.compile_time)).count();
        let max_workers = limits.max_workers();
        if has_idle || queue.num_workers >= max_workers + num_late.min(max_workers) {
            return Ok(());
        }
        let worker = Arc::clone(workers);
        let builder = thread::Builder::new().name("penstock-guidance".into()).stack_size(STACK_BYTES);
        match builder.spawn(move || worker.run()) {
            Ok(_) => queue.num_workers += 1,
            Err(error) if queue.num_workers == 0 => return Err(error),
            Err(_) => {}
        }
        Ok(())
    }

    /// The main loop of a worker thread.
    fn run(&self) {
        let mut queue = self.lock();
        loop {
            let Some(spec) = queue.pop() else {
                if queue.closed || queue.num_workers > self.limits.max_workers() {
                    queue.num_workers -= 1;
                    return;
                }
                queue.num_idle += 1;
                queue = self.job_added.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.num_idle -= 1;
                continue;
            };
            queue.job(&spec).started = Some(Instant::now());
            drop(queue);
            let result = library::call(|| self.builder.build(&spec))
                .unwrap_or_else(|reason| Err(GuidanceError::Library { kind: spec.kind(), reason }))
                .map(Arc::new);
            queue = self.lock();
            if let Ok(compiled) = &result {
                queue.cache.insert(Arc::clone(&spec), Arc::clone(compiled));
            }
            let job = queue.job(&spec);
            if job.num_callers == 0 {
                queue.jobs.remove(&spec);
            } else {
                job.result = Some(result);
                self.job_done.notify_all();
            }
        }
    }

    /// Waits for the result of a job. The last caller that leaves removes the job, unless a worker is compiling it.
    fn wait<'a>(
        &'a self,
        mut queue: MutexGuard<'a, CompileQueue>,
        spec: &Arc<GrammarSpec>,
        caller: &mut dyn Caller,
    ) -> Result<Arc<CompiledGrammar>, GuidanceError> {
        let begin = Instant::now();
        queue.job(spec).num_callers += 1;
        let result = loop {
            let job = queue.job(spec);
            if let Some(result) = job.result.clone() {
                break result;
            }
            let Some(rest) = self.limits.compile_time.checked_sub(job.waiting_since(begin).elapsed()) else {
                break Err(self.timeout_error(spec, job));
            };
            let rest = rest.min(POLL_INTERVAL);
            let (waited, timeout) =
                self.job_done.wait_timeout(queue, rest).unwrap_or_else(PoisonError::into_inner);
            queue = waited;
            if timeout.timed_out() {
                // The callback may block on threads that need this lock.
                drop(queue);
                let continues = caller.is_wanted();
                queue = self.lock();
                if !continues {
                    break Err(GuidanceError::Cancelled { kind: spec.kind() });
                }
            }
        };
        let job = queue.job(spec);
        job.num_callers -= 1;
        if job.num_callers == 0 && (job.result.is_some() || job.started.is_none()) {
            queue.jobs.remove(spec);
            queue.pending.remove(spec);
        }
        result
    }

    /// The error of a job that exceeds the time limit: [`GuidanceError::TimedOut`] only if compilation has started.
    fn timeout_error(&self, spec: &GrammarSpec, job: &CompileJob) -> GuidanceError {
        let (kind, limit) = (spec.kind(), self.limits.compile_time);
        if job.started.is_some() {
            return GuidanceError::TimedOut { kind, limit };
        }
        let reason = format!("other grammars were compiled for {limit:?}, one of each client at a time");
        GuidanceError::Overloaded { kind, reason }
    }
}

impl CompileJob {
    fn is_compiling(&self) -> bool {
        self.result.is_none() && self.started.is_some()
    }

    /// Whether its compilation has exceeded the time limit and goes on.
    fn is_late(&self, limit: Duration) -> bool {
        self.is_compiling() && self.started.is_some_and(|started| started.elapsed() > limit)
    }

    /// The start of the time limit for a caller that waits since `begin`. It restarts when compilation starts.
    fn waiting_since(&self, begin: Instant) -> Instant {
        self.started.map_or(begin, |started| started.max(begin))
    }
}

impl CompileQueue {
    fn job(&mut self, spec: &Arc<GrammarSpec>) -> &mut CompileJob {
        self.jobs.get_mut(spec).expect("a job with callers or a worker stays in the map; this is a bug")
    }

    /// Takes the next grammar of a client without one that is compiled now.
    fn pop(&mut self) -> Option<Arc<GrammarSpec>> {
        let jobs = &self.jobs;
        let is_busy = |client| jobs.values().any(|job| job.client == client && job.is_compiling());
        self.pending.pop(|client| client.is_none() || !is_busy(client))
    }
}
