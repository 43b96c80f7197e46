//! `KvEvents`: the changes of the prefix cache, for Python.

use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_engine::{KvBatch, KvEvent, KvRead, KvTier, StopCause};
use penstock_frontend::kv_events::{BlockEvent, Envelope, block_events, encode};
use penstock_types::KvEvents as Options;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::detach::detach;
use crate::errors::Error;

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct KvEvents {
    /// Locked by detached threads only.
    events: Mutex<penstock_engine::KvEvents>,
    block_size: usize,
    options: Options,
}

impl KvEvents {
    pub fn new(events: penstock_engine::KvEvents, options: Options) -> Self {
        Self { block_size: events.block_size(), events: Mutex::new(events), options }
    }

    fn lock(&self) -> MutexGuard<'_, penstock_engine::KvEvents> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn envelope(&self, timestamp: f64) -> Envelope {
        let Options { rank, format, .. } = self.options;
        Envelope { timestamp, rank, format }
    }

    /// The result of `read` for the new events, or of an empty batch; `None` at the end.
    fn take<T: Send + Default>(
        &self,
        py: Python<'_>,
        read: impl FnOnce(&KvBatch) -> T + Send,
    ) -> Result<Option<T>, Error> {
        let read: Result<_, StopCause> = detach(py, || self.lock().read(read))?;
        Ok(match read? {
            KvRead::Read(result) => Some(result),
            KvRead::Empty | KvRead::Lost => Some(T::default()),
            KvRead::Ended => None,
        })
    }
}

#[pymethods]
impl KvEvents {
    fn read<'py>(&self, py: Python<'py>) -> Result<Option<Vec<Bound<'py, PyTuple>>>, Error> {
        let Some(batch) = self.take(py, KvBatch::clone)? else { return Ok(None) };
        let events = block_events(&batch, self.block_size);
        Ok(Some(events.iter().map(|event| fields(py, event)).collect::<PyResult<_>>()?))
    }

    fn payload<'py>(
        &self,
        py: Python<'py>,
        timestamp: f64,
    ) -> Result<Option<(Bound<'py, PyBytes>, bool)>, Error> {
        let encode = |batch: &KvBatch| {
            let payload = encode(batch, self.block_size, self.envelope(timestamp));
            (payload, batch.events.first() == Some(&KvEvent::Cleared))
        };
        let taken = self.take(py, encode)?;
        Ok(taken.map(|(payload, is_complete)| (PyBytes::new(py, &payload), is_complete)))
    }

    fn cleared<'py>(&self, py: Python<'py>, timestamp: f64) -> Bound<'py, PyBytes> {
        let batch = KvBatch { events: vec![KvEvent::Cleared], ..KvBatch::default() };
        PyBytes::new(py, &encode(&batch, self.block_size, self.envelope(timestamp)))
    }

    fn restart(&self, py: Python<'_>) -> Result<(), Error> {
        detach(py, || self.lock().restart())
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }
}

fn fields<'py>(py: Python<'py>, event: &BlockEvent<'_>) -> PyResult<Bound<'py, PyTuple>> {
    let name = |tier: &KvTier| match tier {
        KvTier::Device => "device",
        KvTier::Host => "host",
    };
    match event {
        BlockEvent::Stored { hashes, parent, tokens, tier, namespace } => {
            let (id, adapter) = namespace.adapter.as_ref().map(|(id, name)| (id.0, &**name)).unzip();
            (hashes, *parent, *tokens, name(tier), adapter, id, namespace.salt.as_deref()).into_pyobject(py)
        }
        BlockEvent::Removed { hashes, tier } => (hashes, name(tier)).into_pyobject(py),
        BlockEvent::Cleared => Ok(PyTuple::empty(py)),
    }
}
