//! The floating-point modes of a thread. Some libraries set the flush of subnormal numbers for a process, and new
//! threads inherit it; subnormal weights would then count as 0, depending on the thread.

/// The default treatment of subnormal numbers, until it is dropped.
pub(super) struct Subnormals {
    previous: Register,
}

impl Subnormals {
    #[inline]
    pub(super) fn kept() -> Self {
        let previous = read();
        if previous & FLUSH != 0 {
            write(previous & !FLUSH);
        }
        Self { previous }
    }
}

impl Drop for Subnormals {
    #[inline]
    fn drop(&mut self) {
        if self.previous & FLUSH != 0 {
            write(self.previous);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    pub(super) type Register = u32;
    /// Results are flushed (bit 15), or operands are (bit 6).
    pub(super) const FLUSH: Register = 0x8040;

    pub(super) fn read() -> Register {
        let mut modes = 0;
        // SAFETY: writes the 4 bytes of `modes`.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut modes, options(nostack, preserves_flags)) };
        modes
    }

    pub(super) fn write(modes: Register) {
        // SAFETY: reads the 4 bytes of `modes`, which were read from this register; only bits of `FLUSH` changed.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const modes, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    pub(super) type Register = u64;
    /// Operands and results are flushed.
    pub(super) const FLUSH: Register = 1 << 24;

    pub(super) fn read() -> Register {
        let modes;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) modes, options(nomem, nostack, preserves_flags)) };
        modes
    }

    pub(super) fn write(modes: Register) {
        // SAFETY: `modes` were read from this register; only the bit of `FLUSH` changed.
        unsafe { asm!("msr fpcr, {}", in(reg) modes, options(nomem, nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub(super) type Register = u32;
    pub(super) const FLUSH: Register = 0;

    pub(super) fn read() -> Register {
        0
    }

    pub(super) fn write(_: Register) {}
}

use register::{FLUSH, Register, read, write};

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Pool;

    #[test]
    fn jobs_keep_subnormals_in_a_thread_that_flushes_them() {
        std::thread::spawn(|| {
            write(read() | FLUSH);
            let pool = Pool::new(2).expect("threads");
            let kept = AtomicUsize::new(0);
            pool.run(&|_| {
                kept.fetch_add(usize::from(read() & FLUSH == 0), Ordering::Relaxed);
            });
            pool.for_each(1, &|_| {
                kept.fetch_add(usize::from(read() & FLUSH == 0), Ordering::Relaxed);
            });
            assert_eq!(kept.into_inner(), 3);
            assert_eq!(read() & FLUSH, FLUSH, "the modes of the caller are restored");
        })
        .join()
        .expect("the thread does not panic");
    }
}
