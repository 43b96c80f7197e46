//! The worker pool: runs one closure on every worker, or on the workers that are ready in time.
//!
//! ```text
//! caller    open ── generation + 1 ── f(0) ── close ── wait until no worker is in the job ── return
//! worker i          wait for it ── join, if open ── f(i) ── leave ── wait for the next generation
//! ```
//!
//! [`Pool::run`] keeps the job open until every worker has joined. [`Pool::share`] closes it when the caller's own call
//! has returned: the workers claim their parts, so the caller does not wait for a worker that the system has not
//! scheduled in time. On a busy machine that wait would be most of a decode step.
//!
//! Worker 0 is the caller. A waiting worker spins and yields briefly, then sleeps, so an idle pool does not use the
//! CPU. A panic in `f` resumes in the caller of [`Pool::run`] after every worker has returned; the pool stays usable.
//! The pool does not allocate after its construction, panics aside.
//!
//! Threads that share a pool take turns ([`Pool::turn`]), so that each job has all workers.
//!
//! A pool may be divided between NUMA nodes: each worker runs on the CPUs of its node, and claims the parts of a job
//! that are near it first. The caller runs there once it has called [`Pool::pin_caller`].

mod counter;
mod float_modes;
mod share;
mod turns;

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

pub(crate) use counter::WaitableCounter;
use float_modes::Subnormals;
pub(crate) use share::{Claims, PanelClaims, SharedMut};
pub use turns::Turn;
use turns::Turns;

use penstock_types::config_limits::MAX_NUMA_NODES;

use crate::cores::prefer_fast_cores;
use crate::numa::pin;

type Job<'a> = &'a (dyn Fn(usize) + Sync);
type Panic = Box<dyn Any + Send>;

/// Threads that run one closure at a time, together with the calling thread.
#[derive(Debug)]
pub struct Pool {
    state: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    turns: Arc<Turns>,
    /// The CPUs of each NUMA node. Empty if the pool is not divided.
    nodes: Vec<Vec<usize>>,
    /// The reason why the threads run on any CPU, though there are nodes.
    pin_error: Option<io::Error>,
}

struct PoolState {
    /// Incremented for every job, and when the pool is closed.
    generation: WaitableCounter,
    /// A [`JoinState`]: whether workers may join, and how many are in the job.
    join_state: WaitableCounter,
    /// Workers that have joined the current job.
    joined: WaitableCounter,
    /// Whether a thread is inside `run` or `share`.
    busy: AtomicBool,
    closed: AtomicBool,
    job: UnsafeCell<Option<Job<'static>>>,
    panic: Mutex<Option<Panic>>,
}

/// The generation of the current job, whether workers may still join it, and the number of workers in it.
struct JoinState(usize);

impl JoinState {
    const OPEN: usize = 1 << 15;
    const SHIFT: u32 = 16;

    fn open_for(generation: usize) -> usize {
        generation << Self::SHIFT | Self::OPEN
    }

    fn admits(&self, generation: usize) -> bool {
        self.0 & !(Self::OPEN - 1) == Self::open_for(generation)
    }

    fn num_active(&self) -> usize {
        self.0 & (Self::OPEN - 1)
    }
}

// SAFETY: `job` is the only part that is not Sync by itself. The thread that has set `busy` writes it while the job is
// closed and no worker is in it, then opens it (release of `join_state`); a worker reads it after joining (acquire),
// and the next write waits until the last worker has left (release and acquire of `join_state` again).
unsafe impl Sync for PoolState {}
// SAFETY: the closure behind `job` is Sync, so a reference to it may move to another thread.
unsafe impl Send for PoolState {}

impl std::fmt::Debug for PoolState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolState").finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `threads` workers, the caller of [`run`](Self::run) included; it starts `threads - 1` of them.
    /// Fails if the system refuses a thread.
    pub fn new(threads: usize) -> io::Result<Pool> {
        Self::on_nodes(threads, Vec::new())
    }

    /// The same, with an equal number of workers on the CPUs of each of `nodes`.
    pub fn on_nodes(threads: usize, nodes: Vec<Vec<usize>>) -> io::Result<Pool> {
        Self::with_turns(threads, nodes, Arc::default())
    }

    fn with_turns(threads: usize, nodes: Vec<Vec<usize>>, turns: Arc<Turns>) -> io::Result<Pool> {
        assert!(
            threads < JoinState::OPEN,
            "{threads} workers; at most {} are supported",
            JoinState::OPEN - 1
        );
        assert!(
            nodes.len() <= MAX_NUMA_NODES && threads.is_multiple_of(nodes.len().max(1)),
            "{threads} workers on {} nodes; this is a bug",
            nodes.len()
        );
        // With more workers than CPUs, a spinning worker delays the one it waits for.
        let spins = threads <= std::thread::available_parallelism().map_or(1, usize::from)
            && nodes.iter().all(|cpus| threads / nodes.len() <= cpus.len());
        let state = Arc::new(PoolState {
            generation: WaitableCounter::new(spins),
            join_state: WaitableCounter::new(spins),
            joined: WaitableCounter::new(spins),
            busy: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        let pin_error = nodes.iter().find_map(|cpus| try_pin(cpus).err());
        // From here on, dropping `pool` ends the started threads.
        let workers = Vec::with_capacity(threads.saturating_sub(1));
        let mut pool = Pool { state, workers, turns, nodes, pin_error };
        let per_node = threads / pool.num_nodes();
        for worker in 1..threads {
            let state = Arc::clone(&pool.state);
            let cpus = pool.pinned_cpus(worker / per_node).map(<[usize]>::to_vec);
            let builder = std::thread::Builder::new().name(format!("penstock-worker-{worker}"));
            pool.workers.push(builder.spawn(move || {
                prefer_fast_cores();
                if let Some(cpus) = cpus {
                    let _ = pin(&cpus); // `try_pin` succeeded; a later failure has no effect on results
                }
                state.work(worker);
            })?);
        }
        Ok(pool)
    }

    /// Makes the calling thread, which is worker 0 of its jobs, run on the CPUs of the first node.
    pub fn pin_caller(&self) {
        prefer_fast_cores();
        if let Some(cpus) = self.pinned_cpus(0) {
            let _ = pin(cpus); // as above
        }
    }

    /// The CPUs of the threads of a node; `None` if they run on any CPU.
    fn pinned_cpus(&self, node: usize) -> Option<&[usize]> {
        if self.pin_error.is_none() { self.nodes.get(node).map(Vec::as_slice) } else { None }
    }

    /// The reason why the threads run on any CPU, though the pool is divided between nodes.
    pub fn pin_error(&self) -> Option<&io::Error> {
        self.pin_error.as_ref()
    }

    /// The number of NUMA nodes; 1 if the pool is not divided.
    pub fn num_nodes(&self) -> usize {
        self.nodes.len().max(1)
    }

    /// The number of workers, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The number of sleeping workers: `threads() - 1` once an idle pool has stopped spinning.
    pub fn sleeping(&self) -> usize {
        self.state.generation.sleepers()
    }

    /// A pool with the turns of `self`: the workers of one of the two run at a time, if their users take turns.
    pub fn with_other_threads(&self, threads: usize) -> io::Result<Pool> {
        Self::with_turns(threads, self.nodes.clone(), Arc::clone(&self.turns))
    }

    /// Whether the two pools have the same turns.
    pub fn shares_turns_with(&self, other: &Pool) -> bool {
        Arc::ptr_eq(&self.turns, &other.turns)
    }

    /// Waits until no other thread has a turn and those that asked before have had theirs. A thread that shares the
    /// pool takes a turn for a sequence of jobs, such as a step of a model. It must not have one already.
    ///
    /// Jobs outside a turn are allowed; they find the pool busy while another thread's job runs.
    pub fn turn(&self) -> Turn {
        self.turns.take()
    }

    /// The number of threads that wait for a turn.
    pub fn waiting(&self) -> usize {
        self.turns.waiting()
    }

    /// Calls `job(worker)` once for every worker and returns when all calls have returned; worker 0 runs here.
    ///
    /// If the pool is busy (a job that calls `run`, or a second thread), the calls are made one after the other on the
    /// calling thread: same result, no deadlock.
    ///
    /// # Panics
    /// With the payload of a call that panicked, after all calls have ended.
    pub fn run(&self, job: Job<'_>) {
        let _modes = Subnormals::kept();
        if !self.try_work(job, true) {
            (0..self.threads()).for_each(job);
        }
    }

    /// Calls `job(worker)` here (worker 0) and at most once on each worker that joins before the call here has
    /// returned. For jobs that claim their parts: when one call returns, every part is finished or in progress in
    /// another call.
    ///
    /// Concurrent use and panics are as for [`run`](Self::run).
    pub fn share(&self, job: Job<'_>) {
        let _modes = Subnormals::kept();
        if !self.try_work(job, false) {
            job(0);
        }
    }

    /// Runs `job` on the workers; returns false if there are none or they are busy.
    fn try_work(&self, job: Job<'_>, needs_all: bool) -> bool {
        let state = &*self.state;
        // Acquire and the release below order one caller's use of `job` before the next one's.
        if self.workers.is_empty() || state.busy.swap(true, Ordering::Acquire) {
            return false;
        }
        // SAFETY: only the lifetime changes. Workers use the reference while they are in the job, and this function
        // does not return (not even by a panic) before the job is closed and every worker has left it.
        let forever = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: this thread has set `busy`, the job is closed and no worker is in it.
        unsafe { *state.job.get() = Some(forever) };
        state.joined.set(0);
        state.join_state.set(JoinState::open_for(state.generation.value().wrapping_add(1)));
        state.generation.increment();
        let own_result = catch_unwind(AssertUnwindSafe(|| job(0)));
        if needs_all {
            state.joined.wait(|joined| joined == self.workers.len());
        }
        state.join_state.clear_bits(JoinState::OPEN);
        state.join_state.wait(|join_state| JoinState(join_state).num_active() == 0);
        let worker_panic = state.take_panic();
        state.busy.store(false, Ordering::Release);
        if let Some(panic) = own_result.err().or(worker_panic) {
            resume_unwind(panic);
        }
        true
    }

    /// A counter at 0, on which the workers of a job wait for parts of it. A part must not wait for parts that no
    /// worker has begun: a worker may join late, or not at all.
    pub(crate) fn counter(&self) -> WaitableCounter {
        self.state.generation.another()
    }

    /// Calls `each(i)` once for every `i` in `0..count`; workers claim indices in ascending order. Panics as
    /// [`run`](Self::run) does; the other workers take over the rest of the panicking worker's share.
    pub fn for_each(&self, count: usize, each: &(dyn Fn(usize) + Sync)) {
        if count <= 1 {
            let _modes = Subnormals::kept();
            return (0..count).for_each(each);
        }
        let claims = Claims::new(count);
        self.share(&|_| {
            while let Some(index) = claims.next() {
                each(index);
            }
        });
    }
}

/// Tries to pin a temporary thread to these CPUs.
fn try_pin(cpus: &[usize]) -> io::Result<()> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || pin(cpus))?;
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

impl Drop for Pool {
    fn drop(&mut self) {
        // The release of `generation` publishes it to the workers.
        self.state.closed.store(true, Ordering::Relaxed);
        self.state.generation.increment();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so it has not panicked.
            let _ = worker.join();
        }
    }
}

impl PoolState {
    fn work(&self, worker: usize) {
        let _modes = Subnormals::kept();
        let mut seen = 0;
        loop {
            seen = self.generation.wait(|generation| generation != seen);
            // Relaxed: `generation` has published it.
            if self.closed.load(Ordering::Relaxed) {
                return;
            }
            if !self.join_state.try_increment(|join_state| JoinState(join_state).admits(seen)) {
                continue; // the job is closed
            }
            self.joined.increment();
            // SAFETY: this worker has joined, so the job is set and stays until it leaves.
            let job = unsafe { *self.job.get() }.expect("a generation without a job; this is a bug");
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
                self.panic.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(panic);
            }
            self.join_state.decrement(|join_state| JoinState(join_state).num_active() == 0);
        }
    }

    fn take_panic(&self) -> Option<Panic> {
        self.panic.lock().unwrap_or_else(|poison| poison.into_inner()).take()
    }
}
