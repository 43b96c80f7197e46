//! The worker pool: one closure, run by every worker or by whoever is there in time.
//!
//! ```text
//! caller    open the door ── generation + 1 ── f(0) ── close the door ── wait until nobody is inside ── return
//! worker i                   wait for it ── enter, if it is open ── f(i) ── leave ── wait for the next generation
//! ```
//!
//! With [`Pool::run`] the door stays open until every worker has come in. With [`Pool::share`] it closes when the caller
//! has run out of work: the workers claim their parts, so one that the system has not let run in time is not waited for.
//! On a busy machine that is most of a decode step's time.
//!
//! Worker 0 is the caller. Waiting means spinning for a moment, then sleeping, so an idle pool uses no CPU. A panic
//! in `f` is carried to the caller of [`Pool::run`] once every worker has returned, and the pool stays usable.
//! Nothing allocates after construction (a panic aside).

mod gate;
mod share;

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use gate::{Gate, SPINS};
pub(crate) use share::{Claims, SharedMut};

type Job<'a> = &'a (dyn Fn(usize) + Sync);
type Panic = Box<dyn Any + Send>;

/// Threads that run one closure at a time, together with the thread that asks for it.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Every change of it is one job, or the end.
    generation: Gate,
    /// Who may come in, and how many are inside: see [`Door`].
    door: Gate,
    /// Workers that have come in since it was opened.
    entered: Gate,
    /// Whether somebody is inside `run`.
    busy: AtomicBool,
    closed: AtomicBool,
    job: UnsafeCell<Option<Job<'static>>>,
    panic: Mutex<Option<Panic>>,
}

/// The value of the door: the generation it was opened for, whether it still is open, and how many workers are inside.
struct Door(usize);

impl Door {
    const OPEN: usize = 1 << 15;
    const SHIFT: u32 = 16;

    fn opened_for(generation: usize) -> usize {
        generation << Self::SHIFT | Self::OPEN
    }

    fn lets_in(&self, generation: usize) -> bool {
        self.0 & !(Self::OPEN - 1) == Self::opened_for(generation)
    }

    fn num_inside(&self) -> usize {
        self.0 & (Self::OPEN - 1)
    }
}

// SAFETY: `job` is the only part that is not Sync by itself. The thread that holds `busy` writes it while the door is
// closed and nobody is inside, then opens the door (release); a worker reads it after it went in (acquire), and the next
// write waits until the last one has left (release and acquire of the door again).
unsafe impl Sync for Shared {}
// SAFETY: the closure behind `job` is Sync, so a reference to it may move to another thread.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool of `threads` workers, the caller of [`run`](Self::run) included; it starts `threads - 1` of them.
    /// Fails if the system refuses a thread.
    pub fn new(threads: usize) -> io::Result<Pool> {
        assert!(threads < Door::OPEN, "{threads} workers: the door counts fewer");
        // More workers than CPUs: whoever spins takes the time of the one it waits for.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if threads <= cpus { SPINS } else { 0 };
        let shared = Arc::new(Shared {
            generation: Gate::new(spins),
            door: Gate::new(spins),
            entered: Gate::new(spins),
            busy: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        // From here on dropping `pool` ends the threads that were started.
        let mut pool = Pool { shared, workers: Vec::with_capacity(threads.saturating_sub(1)) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("penstock-worker-{worker}"));
            pool.workers.push(builder.spawn(move || shared.work(worker))?);
        }
        Ok(pool)
    }

    /// How many workers [`run`](Self::run) calls, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Workers asleep now: `threads() - 1` once an idle pool has stopped spinning.
    pub fn sleeping(&self) -> usize {
        self.shared.generation.sleepers()
    }

    /// Calls `job(worker)` once for every worker and returns when all calls have returned; worker 0 runs here.
    ///
    /// While the pool is already at work (a job that calls `run`, or a second thread) the calls are made one after
    /// the other on the calling thread: same result, no deadlock.
    ///
    /// # Panics
    /// With the payload of a call that panicked, after all calls have ended.
    pub fn run(&self, job: Job<'_>) {
        if !self.try_work(job, true) {
            (0..self.threads()).for_each(job);
        }
    }

    /// Calls `job(worker)` here (worker 0) and at most once on each worker that comes before the call here has returned.
    /// For jobs that claim their parts: when one call returns, every part is done or being done by another call.
    ///
    /// Concurrent use and panics are as with [`run`](Self::run).
    pub fn share(&self, job: Job<'_>) {
        if !self.try_work(job, false) {
            job(0);
        }
    }

    /// Puts the workers to work, unless there are none or they are at it.
    fn try_work(&self, job: Job<'_>, needs_all: bool) -> bool {
        let shared = &*self.shared;
        // Acquire and the release below order one caller's use of `job` before the next one's.
        if self.workers.is_empty() || shared.busy.swap(true, Ordering::Acquire) {
            return false;
        }
        // SAFETY: only the lifetime changes. Workers use the reference while they are inside, and this function does not
        // leave (not even by a panic) before the door is closed and everybody out.
        let forever = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: `busy` is ours, the door is closed and nobody is inside.
        unsafe { *shared.job.get() = Some(forever) };
        shared.entered.set(0);
        shared.door.set(Door::opened_for(shared.generation.value().wrapping_add(1)));
        shared.generation.increment();
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        if needs_all {
            shared.entered.wait(|entered| entered == self.workers.len());
        }
        shared.door.clear_bits(Door::OPEN);
        shared.door.wait(|door| Door(door).num_inside() == 0);
        let theirs = shared.take_panic();
        shared.busy.store(false, Ordering::Release);
        if let Some(panic) = mine.err().or(theirs) {
            resume_unwind(panic);
        }
        true
    }

    /// Calls `each(i)` once for every `i` in `0..count`; workers claim the next index when they are free, in
    /// ascending order. Panics as [`run`](Self::run) does; the panicking worker's share is taken over by the others.
    pub fn for_each(&self, count: usize, each: &(dyn Fn(usize) + Sync)) {
        if count <= 1 {
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

impl Drop for Pool {
    fn drop(&mut self) {
        // The generation's release makes it visible to the workers that it wakes.
        self.shared.closed.store(true, Ordering::Relaxed);
        self.shared.generation.increment();
        for worker in self.workers.drain(..) {
            // A worker catches its jobs' panics, so it cannot have ended by one.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            seen = self.generation.wait(|generation| generation != seen);
            // Relaxed: the generation carried it.
            if self.closed.load(Ordering::Relaxed) {
                return;
            }
            if !self.door.try_increment(|door| Door(door).lets_in(seen)) {
                continue; // too late for this one
            }
            self.entered.increment();
            // SAFETY: this worker is inside, so the job is set and stays until it has left.
            let job = unsafe { *self.job.get() }.expect("a generation without a job; this is a bug");
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
                self.panic.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(panic);
            }
            self.door.decrement(|door| Door(door).num_inside() == 0);
        }
    }

    fn take_panic(&self) -> Option<Panic> {
        self.panic.lock().unwrap_or_else(|poison| poison.into_inner()).take()
    }
}
