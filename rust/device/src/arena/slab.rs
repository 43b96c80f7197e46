//! Where an arena's bytes come from.

use memmap2::MmapMut;

/// Memory that an arena divides; it starts at 0, grows at its end and never moves what is in it to another offset.
pub trait Slab {
    /// Makes the first `bytes` bytes usable; fewer than are usable already is no change. If refused, nothing changes.
    fn commit(&mut self, bytes: usize) -> Result<(), SlabRefused>;
}

/// The memory cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of memory cannot be had: {reason}")]
pub struct SlabRefused {
    /// How much was asked for.
    pub bytes: usize,
    /// Why not.
    pub reason: String,
}

/// Host memory: one page-aligned mapping, reserved once. Pages are zero, and cost memory, when they are first touched.
#[derive(Debug)]
pub struct HostSlab(MmapMut);

impl HostSlab {
    /// Address space for `bytes`. Refusal by the operating system is an error, never an abort.
    pub fn reserve(bytes: usize) -> Result<Self, SlabRefused> {
        let refused = |error: std::io::Error| SlabRefused { bytes, reason: error.to_string() };
        MmapMut::map_anon(bytes.max(1)).map(Self).map_err(refused)
    }
}

impl Slab for HostSlab {
    fn commit(&mut self, bytes: usize) -> Result<(), SlabRefused> {
        if bytes <= self.0.len() {
            return Ok(());
        }
        Err(SlabRefused { bytes, reason: format!("{} were reserved", self.0.len()) })
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

/// Plain memory: offsets are aligned, addresses need not be.
#[cfg(test)]
impl Slab for Vec<u8> {
    fn commit(&mut self, bytes: usize) -> Result<(), SlabRefused> {
        let more = bytes.saturating_sub(self.len());
        self.try_reserve(more).map_err(|error| SlabRefused { bytes, reason: error.to_string() })?;
        self.resize(self.len() + more, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_is_zero_page_aligned_and_bounded_by_its_reservation() {
        let mut slab = HostSlab::reserve(10_000).expect("three pages");
        assert_eq!((slab.commit(10_000), slab.as_ref()[9_999]), (Ok(()), 0));
        assert_eq!(slab.as_mut().as_ptr().align_offset(4096), 0);
        let refusal = slab.commit(10_001).expect_err("beyond the reservation").to_string();
        assert_eq!(refusal, "10001 bytes of memory cannot be had: 10000 were reserved");
    }

    #[test]
    fn memory_no_machine_has_is_refused_with_its_size() {
        assert_eq!(HostSlab::reserve(1 << 60).expect_err("refused").bytes, 1 << 60);
        assert_eq!(Vec::new().commit(usize::MAX).expect_err("refused").bytes, usize::MAX);
    }

    #[test]
    fn a_vector_never_shrinks() {
        let mut slab = vec![1, 2, 3];
        assert_eq!((slab.commit(1), slab.commit(4)), (Ok(()), Ok(())));
        assert_eq!(slab, [1, 2, 3, 0]);
    }
}
