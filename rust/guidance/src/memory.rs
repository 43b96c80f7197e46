//! The memory of all matchers of a compiler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A matcher may have this part of the bytes that the others leave. So no number of large matchers takes all of them,
/// and there is always room for small ones (dynamic thresholds: Choudhury and Hahne, 1998).
const PART: usize = 4;

/// The bytes of all matchers, and their limit.
#[derive(Debug)]
pub(crate) struct MatcherMemory {
    limit: usize,
    used: AtomicUsize,
}

impl MatcherMemory {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    /// Memory of a matcher, without bytes yet.
    pub(crate) fn share(self: &Arc<Self>) -> MemoryShare {
        MemoryShare { memory: Arc::clone(self), bytes: 0 }
    }
}

/// The bytes of one matcher.
#[derive(Debug)]
pub(crate) struct MemoryShare {
    memory: Arc<MatcherMemory>,
    bytes: usize,
}

impl MemoryShare {
    /// Changes the bytes of the matcher.
    ///
    /// # Errors
    /// The limit, if it has more. Its bytes are unchanged then.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), String> {
        if bytes > self.bytes {
            let others = self.memory.used.load(Ordering::Relaxed).saturating_sub(self.bytes);
            let limit = self.memory.limit.saturating_sub(others) / PART;
            if bytes > limit {
                return Err(format!(
                    "the state of the sequence has {bytes} bytes; the limit is {limit}, a quarter of what others leave"
                ));
            }
        }
        // Sequences that grow at the same time may exceed the limit by as much as they grow.
        self.memory.used.fetch_add(bytes, Ordering::Relaxed);
        self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matcher_has_a_part_of_what_others_leave() {
        let memory = MatcherMemory::new(1_000);
        let mut first = memory.share();
        assert!(first.resize(251).is_err());
        first.resize(250).expect("a quarter of all");
        let mut second = memory.share();
        let error = second.resize(188).expect_err("a quarter of 750 is 187");
        assert!(error.contains("has 188 bytes; the limit is 187"), "{error}");
        second.resize(187).expect("a quarter of the rest");
        first.resize(100).expect("it shrinks");
        second.resize(225).expect("a quarter of 900");
        drop((first, second));
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn small_matchers_have_room_beside_many_large_ones() {
        let memory = MatcherMemory::new(1 << 30);
        let grow = || {
            let mut share = memory.share();
            let mut bytes = 0;
            while share.resize(bytes + 4_096).is_ok() {
                bytes += 4_096;
            }
            share
        };
        let large: Vec<_> = (0..256).map(|_| grow()).collect();
        assert!(memory.used.load(Ordering::Relaxed) <= 1 << 30);
        assert!(large[0].bytes > 100 << 20);
        // At equilibrium, 256 equal ones have 4 MiB each.
        drop(large);
        let mut equal: Vec<_> = (0..256).map(|_| memory.share()).collect();
        while equal.iter_mut().filter_map(|share| share.resize(share.bytes + 4_096).ok()).count() > 0 {}
        assert!(equal.iter().all(|share| share.bytes > 2 << 20));
        memory.share().resize(2 << 20).expect("room for another one");
    }
}
