//! The end of calls of the library that take too long.
//!
//! The library's own limits count most of its work, but not text that the grammar forces without an end, such as that of
//! `A "a"` with `A: /a+/`: the call does not return. A thread checks the running calls at intervals, and cancels those
//! that have used too much processor time. The library ends a cancelled call within microseconds.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use llguidance::{CancellationHandle, TokenParser};

/// The time between two checks.
const INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    /// The number of the calling thread in /proc; 0 where there is none.
    static TASK: u64 = fs::read_link("/proc/thread-self")
        .ok()
        .and_then(|path| path.file_name()?.to_str()?.parse().ok())
        .unwrap_or(0);
}

/// Cancels late calls of parsers. Its thread begins with the first parser and ends with the watchdog.
#[derive(Debug, Default)]
pub(crate) struct Watchdog(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<WatchdogState>,
    /// Signals the thread: there is a parser, or the watchdog is dropped.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WatchdogState {
    parsers: Vec<Seen>,
    has_thread: bool,
    is_closed: bool,
}

/// The call of a parser that the thread has seen last.
#[derive(Debug)]
struct Seen {
    calls: Weak<Calls>,
    /// The number of the call at the last look.
    number: u64,
    /// The looks at it, and the time of its thread at the first one.
    num_looks: u32,
    start: Option<Duration>,
}

/// The calls of one parser, of which one runs at a time.
#[derive(Debug)]
struct Calls {
    handle: CancellationHandle,
    /// Grows at the start and at the end of each call, so it is odd during one.
    number: AtomicU64,
    /// The thread of the call.
    task: AtomicU64,
    /// The nanoseconds of processor time that the call may take.
    limit: AtomicU64,
}

/// The calls of a parser, with a limit on the processor time of each.
#[derive(Debug)]
pub(crate) struct WatchedParser(Arc<Calls>);

impl Watchdog {
    /// Watches the calls of a parser until the returned value is dropped.
    pub(crate) fn watch(&self, parser: &mut TokenParser) -> WatchedParser {
        let mut state = self.0.lock();
        if !state.has_thread {
            let shared = Arc::clone(&self.0);
            let thread = thread::Builder::new().name("penstock-watch".to_owned());
            // Without a thread, the library's own limits remain, and the next parser tries again.
            state.has_thread = thread.spawn(move || shared.run()).is_ok();
        }
        if state.parsers.is_empty() {
            self.0.changed.notify_one();
        }
        state.watch(parser.enable_cancellation())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, WatchdogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the calls until the watchdog is dropped. Waits while there is no parser.
    fn run(&self) {
        let mut state = self.lock();
        while !state.is_closed {
            state = if state.parsers.is_empty() {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.changed.wait_timeout(state, INTERVAL).unwrap_or_else(PoisonError::into_inner).0
            };
            state.look(processor_time);
        }
    }
}

impl WatchdogState {
    fn watch(&mut self, handle: CancellationHandle) -> WatchedParser {
        let [number, task, limit] = [0; 3].map(AtomicU64::new);
        let calls = Arc::new(Calls { handle, number, task, limit });
        self.parsers.push(Seen { calls: Arc::downgrade(&calls), number: 0, num_looks: 0, start: None });
        WatchedParser(calls)
    }

    /// Looks at all calls, and cancels those that are late. `time_of` is the processor time of a thread. Where it is not
    /// known, looks are counted: the thread makes none while the process is stopped.
    fn look(&mut self, time_of: impl Fn(u64) -> Option<Duration>) {
        self.parsers.retain_mut(|seen| {
            let Some(calls) = seen.calls.upgrade() else { return false };
            let number = calls.number.load(Ordering::Acquire);
            if number.is_multiple_of(2) {
                return true;
            }
            let now = time_of(calls.task.load(Ordering::Relaxed));
            if number != seen.number {
                (seen.number, seen.num_looks, seen.start) = (number, 0, now);
            }
            let spent = match (seen.start, now) {
                (Some(start), Some(now)) => now.saturating_sub(start),
                _ => INTERVAL * seen.num_looks,
            };
            seen.num_looks += 1;
            if spent >= Duration::from_nanos(calls.limit.load(Ordering::Relaxed)) {
                calls.handle.cancel();
            }
            true
        });
    }
}

/// The processor time of a thread of this process.
fn processor_time(task: u64) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/self/task/{task}/schedstat")).ok()?;
    Some(Duration::from_nanos(text.split(' ').next()?.parse().ok()?))
}

impl WatchedParser {
    /// Makes a call that may take this processor time.
    pub(crate) fn call<T>(&self, limit: Duration, call: impl FnOnce() -> T) -> T {
        self.0.task.store(TASK.with(|task| *task), Ordering::Relaxed);
        self.0.limit.store(limit.as_nanos() as u64, Ordering::Relaxed);
        self.0.number.fetch_add(1, Ordering::Release);
        let result = call();
        self.0.number.fetch_add(1, Ordering::Release);
        result
    }

    /// Whether a call was late. The parser fails from then on.
    pub(crate) fn is_late(&self) -> bool {
        self.0.handle.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);

    #[test]
    fn calls_are_cancelled_after_their_time() {
        let mut state = WatchdogState::default();
        let [idle, busy, late, other] = [(); 4].map(|()| state.watch(CancellationHandle::default()));
        let seconds = |seconds: f64| move |_: u64| Some(Duration::from_secs_f64(seconds));
        late.call(LIMIT, || {
            for (now, is_late) in [(7.0, false), (7.5, false), (7.99, false), (8.0, true), (9.0, true)] {
                busy.call(LIMIT, || state.look(seconds(now)));
                assert_eq!(late.is_late(), is_late, "at {now}");
            }
        });
        other.call(LIMIT, || state.look(seconds(9.5))); // the first look at this call
        assert_eq!([&idle, &busy, &late, &other].map(WatchedParser::is_late), [false, false, true, false]);
        drop((idle, late));
        state.look(seconds(10.0));
        assert_eq!(state.parsers.len(), 2);
    }

    #[test]
    fn looks_count_where_the_time_is_not_known() {
        let mut state = WatchdogState::default();
        let watched = state.watch(CancellationHandle::default());
        watched.call(LIMIT, || {
            for look in 0..=20 {
                assert!(!watched.is_late(), "before look {look}");
                state.look(|_| None);
            }
        });
        assert!(watched.is_late());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn processor_time_is_that_of_the_thread() {
        let task = TASK.with(|task| *task);
        let before = processor_time(task).expect("the thread is there");
        let started = Instant::now();
        while processor_time(task).expect("the thread is there") < before + Duration::from_millis(5) {}
        assert!(started.elapsed() >= Duration::from_millis(4));
        assert_eq!(processor_time(u64::MAX), None);
    }
}
