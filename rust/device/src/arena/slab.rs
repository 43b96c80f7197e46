//! The memory of an arena.

use crate::system::{Reserved, reserve};

/// Memory that an arena divides. It starts at offset 0 and grows at its end; its content keeps its offsets.
pub trait Slab {
    /// Makes the first `bytes` bytes usable; never shrinks. A failure changes nothing.
    fn commit(&mut self, bytes: usize) -> Result<(), SlabError>;
}

/// The memory is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot reserve {bytes} bytes of memory: {reason}")]
pub struct SlabError {
    pub bytes: usize,
    /// The reason, in the words of the operating system.
    pub reason: String,
}

/// Host memory: one page-aligned mapping, reserved once. A page is zero and takes no memory until it is first written.
#[derive(Debug)]
pub struct HostSlab(Reserved);

impl HostSlab {
    /// Reserves address space for `bytes`. A failure is an error, never an abort.
    pub fn reserve(bytes: usize) -> Result<Self, SlabError> {
        let refused = |error: std::io::Error| SlabError { bytes, reason: error.to_string() };
        reserve(bytes.max(1)).map(Self).map_err(refused)
    }
}

impl Slab for HostSlab {
    fn commit(&mut self, bytes: usize) -> Result<(), SlabError> {
        let reserved = self.0.len();
        if bytes <= reserved {
            return Ok(());
        }
        Err(SlabError { bytes, reason: format!("only {reserved} are reserved") })
    }
}

impl AsRef<[u8]> for HostSlab {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl AsMut<[u8]> for HostSlab {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Plain memory, for tests: offsets are aligned, addresses need not be.
#[cfg(test)]
impl Slab for Vec<u8> {
    fn commit(&mut self, bytes: usize) -> Result<(), SlabError> {
        let more = bytes.saturating_sub(self.len());
        self.try_reserve(more).map_err(|error| SlabError { bytes, reason: error.to_string() })?;
        self.resize(self.len() + more, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_zero_page_aligned_and_bounded() {
        let mut slab = HostSlab::reserve(10_000).expect("three pages");
        assert_eq!((slab.commit(10_000), slab.as_ref()[9_999]), (Ok(()), 0));
        assert_eq!(slab.as_mut().as_ptr().align_offset(4096), 0);
        let error = slab.commit(10_001).expect_err("beyond the reservation").to_string();
        assert_eq!(error, "cannot reserve 10001 bytes of memory: only 10000 are reserved");
    }

    #[test]
    fn excessive_size_is_an_error_with_the_size() {
        assert_eq!(HostSlab::reserve(1 << 60).expect_err("refused").bytes, 1 << 60);
        assert_eq!(Vec::new().commit(usize::MAX).expect_err("refused").bytes, usize::MAX);
    }

    #[test]
    fn vector_slab_never_shrinks() {
        let mut slab = vec![1, 2, 3];
        assert_eq!((slab.commit(1), slab.commit(4)), (Ok(()), Ok(())));
        assert_eq!(slab, [1, 2, 3, 0]);
    }
}
