//! The available memory on Windows.

use std::ptr;

use windows_sys::Win32::System::JobObjects::{
    JOB_OBJECT_LIMIT_JOB_MEMORY, JOB_OBJECT_LIMIT_PROCESS_MEMORY, JOBOBJECT_EXTENDED_LIMIT_INFORMATION,
    JobObjectExtendedLimitInformation, QueryInformationJobObject,
};
use windows_sys::Win32::System::ProcessStatus::{K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS};
use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

use super::{AvailableMemory, MemoryLimit};

/// Bytes available to this process: the lowest of the physical memory that can be used at once, what the system still
/// commits to in memory and page files, and what the limits of its job leave.
pub(crate) fn available_memory() -> AvailableMemory {
    let mut status =
        MEMORYSTATUSEX { dwLength: size_of::<MEMORYSTATUSEX>() as u32, ..MEMORYSTATUSEX::default() };
    // SAFETY: the system writes one structure of the size in it. The call fails for a wrong size only.
    unsafe { GlobalMemoryStatusEx(&mut status) };
    let system = AvailableMemory::from(status.ullAvailPhys.min(status.ullAvailPageFile));
    match job_limits().and_then(|limits| job_available(&limits, committed_bytes())) {
        Some(job) => system.at_most(job),
        None => system,
    }
}

/// The limits of the innermost job of this process; `None` without a job.
fn job_limits() -> Option<JOBOBJECT_EXTENDED_LIMIT_INFORMATION> {
    let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
    // SAFETY: the system writes one structure of this size. A null handle is the job of the process.
    let status = unsafe {
        QueryInformationJobObject(
            ptr::null_mut(),
            JobObjectExtendedLimitInformation,
            (&raw mut limits).cast(),
            size_of_val(&limits) as u32,
            ptr::null_mut(),
        )
    };
    (status != 0).then_some(limits)
}

/// The rest of the limits of a job for a process that has committed this number of bytes. Other processes of the job are
/// not counted: Windows does not document their memory.
fn job_available(limits: &JOBOBJECT_EXTENDED_LIMIT_INFORMATION, committed: u64) -> Option<AvailableMemory> {
    let flags = limits.BasicLimitInformation.LimitFlags;
    let applies = |flag, limit: usize| (flags & flag != 0).then_some(limit as u64);
    let process = applies(JOB_OBJECT_LIMIT_PROCESS_MEMORY, limits.ProcessMemoryLimit);
    let job = applies(JOB_OBJECT_LIMIT_JOB_MEMORY, limits.JobMemoryLimit);
    let bytes = process.into_iter().chain(job).min()?;
    let subject = "the memory of the process or of its job";
    Some(MemoryLimit { subject, setting: String::new(), bytes }.available(committed))
}

/// The memory that the system has committed to for this process.
fn committed_bytes() -> u64 {
    let mut counters = PROCESS_MEMORY_COUNTERS::default();
    // SAFETY: the system writes one structure of this size. The call fails for an invalid argument only.
    unsafe { K32GetProcessMemoryInfo(GetCurrentProcess(), &mut counters, size_of_val(&counters) as u32) };
    counters.PagefileUsage as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_memory_is_available() {
        assert!(available_memory().bytes > 1 << 20);
        assert!(committed_bytes() > 1 << 16);
    }

    #[test]
    fn the_lowest_limit_of_a_job_holds() {
        let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION {
            ProcessMemoryLimit: 1000,
            JobMemoryLimit: 600,
            ..Default::default()
        };
        let bytes = |limits: &_, committed| job_available(limits, committed).map(|available| available.bytes);
        assert_eq!(bytes(&limits, 100), None, "no limit is in force");
        limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_PROCESS_MEMORY;
        assert_eq!(bytes(&limits, 100), Some(900));
        limits.BasicLimitInformation.LimitFlags |= JOB_OBJECT_LIMIT_JOB_MEMORY;
        assert_eq!(bytes(&limits, 100), Some(500));
        assert_eq!(bytes(&limits, 700), Some(0));
    }
}
