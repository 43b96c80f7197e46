//! `penstock._core`: the Python extension module, the only crate that depends on PyO3.
//!
//! Calls arrive attached to the interpreter, run everything that takes longer than a few microseconds in `detach`, and
//! return immutable values. No attached code waits, and no panic leaves the crate. Threads of the engine attach only to
//! call a logits processor, and that of `call_deep` to call a function. Event loops wait in Python, on the file
//! descriptor of a `Port`.

mod adapters;
mod beams;
mod class;
#[rustfmt::skip]
#[allow(unsafe_op_in_unsafe_fn, reason = "PyO3 calls `__getattr__` so")]
mod classes;
mod config;
mod convert;
mod convert_model;
mod cuda;
mod deep_call;
mod describe;
mod detach;
mod engine;
mod errors;
mod fields;
mod health;
mod host;
mod kv_events;
mod load_progress;
mod logs;
mod model_files;
mod params;
mod port;
mod processors;
mod request;
mod response_type;
mod tensor;
#[cfg(feature = "testing")]
mod testing;
mod to_dict;
mod tokenizer;
mod value;

/// See `_core.pyi`.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::beams::{BeamSearch, best_of, candidate_params, score};
    #[pymodule_export]
    use crate::classes::{
        PyAdapterInfo, PyChoice, PyChunk, PyCudaDevice, PyCudaInfo, PyEngineConfig, PyHealth, PyHistogram,
        PyHostTierInfo, PyMemoryInfo, PyModelInfo, PyNumaInfo, PyProfileRow, PyRequestOutput,
        PySamplingParams, PyScore, PyStats, PyTimings, PyToolCall, PyToolCallDelta, PyUsage,
        PyWeightFormatInfo,
    };
    #[pymodule_export]
    use crate::convert_model::{check_output, convert};
    #[pymodule_export]
    use crate::cuda::{cuda_info, resolve_device};
    #[pymodule_export]
    use crate::deep_call::{call_deep, has_large_stack};
    #[pymodule_export]
    use crate::describe::describe;
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::host::Host;
    #[pymodule_export]
    use crate::kv_events::KvEvents;
    #[pymodule_export]
    use crate::port::Port;
    #[pymodule_export]
    use crate::request::Request;
    #[pymodule_export]
    use crate::tensor::Tensor;
    #[pymodule_export]
    use crate::tokenizer::Tokenizer;
    #[pymodule_init]
    #[cfg_attr(not(feature = "testing"), allow(clippy::unnecessary_wraps))]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        // The first cast to `PyMapping` imports `collections.abc`, and panics if it cannot, as at the interpreter's exit.
        <pyo3::types::PyMapping as pyo3::PyTypeInfo>::type_object(module.py());
        #[cfg(feature = "testing")]
        crate::testing::add_to(module)?;
        Ok(())
    }

    /// Version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's spelling")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
