//! The CPU time of a thread, which does not count the time in which other threads run instead.

use std::time::Duration;

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

#[cfg(unix)]
fn thread_time() -> Duration {
    use rustix::time::{ClockId, clock_gettime};

    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(windows)]
fn thread_time() -> Duration {
    use windows_sys::Win32::Foundation::FILETIME;
    use windows_sys::Win32::System::Threading::{GetCurrentThread, GetThreadTimes};

    let [mut created, mut exited, mut kernel, mut user] = [FILETIME::default(); 4];
    // SAFETY: the system writes four structures. The call fails for an invalid thread only.
    unsafe { GetThreadTimes(GetCurrentThread(), &mut created, &mut exited, &mut kernel, &mut user) };
    let units = |time: FILETIME| u64::from(time.dwHighDateTime) << 32 | u64::from(time.dwLowDateTime);
    Duration::from_nanos(100 * (units(kernel) + units(user)))
}
