//! The cores that compute: all of them, except on Apple's CPUs, where those that save energy would delay the others. A
//! parallel part ends with its slowest thread.

/// The number of CPUs that a pool of threads can use well: those that the process may use, and on macOS those of the
/// fastest kind.
pub fn usable_cpus() -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    usable_of(available, fastest_cores())
}

fn usable_of(available: usize, fastest: Option<usize>) -> usize {
    fastest.map_or(available, |cores| cores.min(available))
}

/// The number of cores of the fastest kind; `None` if all are of one kind, or the system does not tell.
#[cfg(target_os = "macos")]
fn fastest_cores() -> Option<usize> {
    let mut cores: libc::c_int = 0;
    let mut size = size_of_val(&cores);
    // SAFETY: the name ends with zero, and the system writes at most `size` bytes to `cores`.
    let status = unsafe {
        libc::sysctlbyname(
            c"hw.perflevel0.logicalcpu".as_ptr(),
            (&raw mut cores).cast(),
            &mut size,
            std::ptr::null_mut(),
            0,
        )
    };
    usize::try_from(cores).ok().filter(|cores| status == 0 && *cores > 0)
}

#[cfg(not(target_os = "macos"))]
fn fastest_cores() -> Option<usize> {
    None
}

/// Asks macOS to run the calling thread on cores of the fastest kind; without this class, it also uses the others. Has no
/// effect on other systems.
pub(crate) fn prefer_fast_cores() {
    #[cfg(target_os = "macos")]
    // SAFETY: sets an attribute of the calling thread only.
    unsafe {
        libc::pthread_set_qos_class_self_np(libc::qos_class_t::QOS_CLASS_USER_INITIATED, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_cpus_are_the_fastest_of_the_available_ones() {
        assert_eq!([Some(4), Some(12), None].map(|fastest| usable_of(8, fastest)), [4, 8, 8]);
    }
}
