//! Page-locked memory of the host, which is counted in the account of the host.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use penstock_cuda::{Context, CudaError, PinnedBlock, PinnedMemory};

use super::allocation;
use crate::cpu::{CpuHost, Reservation};
use crate::error::DeviceError;

/// The page-locked memory of a backend.
#[derive(Clone)]
pub(super) struct HostMemory {
    pub context: Arc<Context>,
    account: Arc<Reservation>,
}

impl HostMemory {
    pub fn new(context: &Arc<Context>, host: &CpuHost) -> Self {
        Self { context: Arc::clone(context), account: host.reserve_without_arena() }
    }

    /// Counts the memory that is planned, and everything else that the backend takes of the host.
    pub fn reserve(&self, bytes: u64) {
        self.account.set_outside(bytes);
    }

    /// Bytes that are taken.
    pub fn taken(&self) -> u64 {
        self.account.locked()
    }

    /// Memory filled with zeros.
    pub fn zeroed(&self, what: &'static str, bytes: usize) -> Result<Counted<PinnedMemory>, DeviceError> {
        self.counted(what, bytes.max(1), PinnedMemory::new)
    }

    /// Memory with any contents, for kernels.
    pub fn block(&self, what: &'static str, bytes: usize) -> Result<Counted<PinnedBlock>, DeviceError> {
        self.counted(what, bytes.max(1), PinnedBlock::new)
    }

    fn counted<M>(
        &self,
        what: &'static str,
        bytes: usize,
        new: impl FnOnce(&Arc<Context>, usize) -> Result<M, CudaError>,
    ) -> Result<Counted<M>, DeviceError> {
        let memory = new(&self.context, bytes).map_err(|error| allocation(what, bytes, error))?;
        self.account.lock(bytes as u64);
        Ok(Counted { memory, bytes: bytes as u64, account: Arc::clone(&self.account) })
    }
}

/// Memory that is counted until it is dropped.
pub(super) struct Counted<M> {
    memory: M,
    bytes: u64,
    account: Arc<Reservation>,
}

impl<M> Deref for Counted<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.memory
    }
}

impl<M> DerefMut for Counted<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.memory
    }
}

impl<M> Drop for Counted<M> {
    fn drop(&mut self) {
        self.account.unlock(self.bytes);
    }
}
