//! The process that opened an engine. A fork copies the handles of an engine, but none of the threads behind them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::request::StopCause;

/// The number of forks between the process that loaded this library and the current one. Relaxed: only a fork changes
/// it, in a process that has a single thread at that time.
static NUM_FORKS: AtomicU64 = AtomicU64::new(0);

/// A process, as a handle remembers it. It counts forks because a process id costs a system call to read, and is
/// reused.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    id: u32,
    num_forks: u64,
}

impl Process {
    /// The process of the caller.
    pub fn current() -> Self {
        watch_forks();
        Self { id: std::process::id(), num_forks: NUM_FORKS.load(Ordering::Relaxed) }
    }

    /// Whether the caller runs in this process, not in the child of a fork.
    pub fn is_current(self) -> bool {
        self.num_forks == NUM_FORKS.load(Ordering::Relaxed)
    }

    /// This process as the child of a fork remembers it, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn in_child(self) -> Self {
        Self { num_forks: self.num_forks.wrapping_sub(1), ..self }
    }

    /// Returns an error in the child of a fork.
    pub fn check(self) -> Result<(), StopCause> {
        if self.is_current() { Ok(()) } else { Err(StopCause::Forked(self.id)) }
    }
}

/// Begins to count forks.
#[cfg(unix)]
fn watch_forks() {
    use std::sync::Once;

    /// Runs in the child of every fork.
    extern "C" fn count_fork() {
        NUM_FORKS.fetch_add(1, Ordering::Relaxed);
    }

    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler only adds to an atomic, which is safe in the child of a process with several threads; the
        // library is never unloaded. The only error is a lack of memory: handles are then not protected.
        unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    });
}

/// A process of Windows is never copied.
#[cfg(windows)]
fn watch_forks() {}
