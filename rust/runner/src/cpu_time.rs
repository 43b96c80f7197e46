//! The CPU time of a thread, which does not count the time in which other threads run instead.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Measures the CPU time of the calling thread.
pub(crate) struct CpuTimer(Duration);

impl CpuTimer {
    /// Starts at 0.
    pub fn start() -> Self {
        Self(thread_time())
    }

    /// The CPU time of the calling thread, which has started the timer, since then.
    pub fn elapsed(&self) -> Duration {
        thread_time().saturating_sub(self.0)
    }
}

fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}
