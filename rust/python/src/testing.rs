//! The module `penstock._core._testing`, behind the feature `testing`: hooks of the test suite. It has logits without
//! engine and sampler, probabilities without a model, engines with failing steps or a fake executor, and log records.

use std::path::PathBuf;

use penstock_checkpoint::{Checkpoint, GenerationConfig};
use penstock_frontend::FakeExecutor;
use penstock_frontend::config;
use penstock_frontend::params::ModelLimits;
use penstock_runner::{CudaSettings, Faults, LaunchConfig};
use penstock_types::{Auto, Dtype, EngineConfig, GridRows, KvDtype, Named, WeightFormat};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::classes::PyEngineConfig;
use crate::classes::PySamplingParams;
use crate::detach::detach;
use crate::engine::Engine;
use crate::errors::Error;
use crate::host::Host;
use crate::model_files::ModelFiles;
use crate::value::{PyValue, config_error};

/// Adds the module to `penstock._core`. It is not in `__all__`, because wheels do not have it.
pub fn add_to(core: &Bound<'_, PyModule>) -> PyResult<()> {
    let module = PyModule::new(core.py(), "_testing")?;
    module.add_function(wrap_pyfunction!(logits, &module)?)?;
    module.add_function(wrap_pyfunction!(probabilities, &module)?)?;
    module.add_function(wrap_pyfunction!(failing_engine, &module)?)?;
    module.add_function(wrap_pyfunction!(losing_engine, &module)?)?;
    module.add_function(wrap_pyfunction!(fake_engine, &module)?)?;
    module.add_function(wrap_pyfunction!(log_records, &module)?)?;
    module.add_function(wrap_pyfunction!(tensor, &module)?)?;
    module.add_function(wrap_pyfunction!(cuda_kernels, &module)?)?;
    module.add_function(wrap_pyfunction!(compile_cuda_kernel, &module)?)?;
    module.add_function(wrap_pyfunction!(archive_cuda_kernel, &module)?)?;
    module.add_function(wrap_pyfunction!(cuda_rms_norm, &module)?)?;
    module.add_function(wrap_pyfunction!(cuda_program, &module)?)?;
    module.add_function(wrap_pyfunction!(cuda_compile_options, &module)?)?;
    core.setattr("_testing", module)
}

/// The names of the CUDA kernels' files.
#[pyfunction]
pub fn cuda_kernels(cuda_folders: Vec<PathBuf>) -> Result<Vec<String>, Error> {
    let compiler = CudaSettings::from_environment(cuda_folders).compiler(None);
    let compiler = compiler.map_err(|error| Error::Failed(error.to_string()))?;
    Ok(compiler.names().map(str::to_owned).collect())
}

/// The image of a CUDA kernel's file for an architecture.
#[pyfunction]
pub fn compile_cuda_kernel<'py>(
    py: Python<'py>,
    cuda_folders: Vec<PathBuf>,
    name: &str,
    architecture: &str,
) -> Result<Bound<'py, PyBytes>, Error> {
    let settings = CudaSettings::from_environment(cuda_folders);
    let image = detach(py, || {
        let compiler = settings.compiler(None).map_err(|error| error.to_string())?;
        compiler.image(name, "", architecture).map_err(|error| error.to_string())
    })?;
    image.map(|image| PyBytes::new(py, &image)).map_err(Error::Failed)
}

/// Compiles a CUDA kernel's file for an architecture, and adds the image to the archive.
#[pyfunction]
pub fn archive_cuda_kernel(
    py: Python<'_>,
    cuda_folders: Vec<PathBuf>,
    name: &str,
    variant: &str,
    architecture: &str,
) -> Result<(), Error> {
    let settings = CudaSettings::from_environment(cuda_folders);
    let added = detach(py, || {
        let compiler = settings.compiler(None).map_err(|error| error.to_string())?;
        compiler.add_to_archive(name, variant, architecture).map_err(|error| error.to_string())
    })?;
    added.map_err(Error::Failed)
}

/// See `tests/support/hooks.py`.
/// The norms of the rows of `x` by a kernel on the first CUDA device.
#[pyfunction]
pub fn cuda_rms_norm(
    py: Python<'_>,
    cuda_folders: Vec<PathBuf>,
    x: Vec<f32>,
    weight: Vec<f32>,
) -> Result<Vec<f32>, Error> {
    let settings = CudaSettings::from_environment(cuda_folders);
    detach(py, || settings.rms_norm(&x, &weight))?.map_err(Error::Failed)
}

/// Runs a program on the first CUDA device.
#[pyfunction]
pub fn cuda_program(py: Python<'_>, cuda_folders: Vec<PathBuf>, name: &str) -> Result<(), Error> {
    let settings = CudaSettings::from_environment(cuda_folders);
    detach(py, || settings.program(name))?.map_err(Error::Failed)
}

/// The options of the compiler of CUDA kernels, besides the architecture.
#[pyfunction]
pub fn cuda_compile_options() -> &'static [&'static str] {
    penstock_runner::CUDA_COMPILE_OPTIONS
}

/// Logits after each token, little-endian `f32` of shape `[tokens, vocabulary]`.
#[pyfunction]
#[pyo3(signature = (path, token_ids, *, dtype = "float32", quantization = None, kv_cache_dtype = "auto", threads = 1, chunk = 512))]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python function")]
pub fn logits<'py>(
    py: Python<'py>,
    path: PathBuf,
    token_ids: Vec<u32>,
    dtype: &str,
    quantization: Option<Bound<'py, PyAny>>,
    kv_cache_dtype: &str,
    threads: usize,
    chunk: usize,
) -> Result<Bound<'py, PyBytes>, Error> {
    let mut options = EngineConfig {
        dtype: Auto(Dtype::from_name(dtype)),
        kv_cache_dtype: Auto(KvDtype::from_name(kv_cache_dtype)),
        threads: Some(threads),
        ..EngineConfig::default()
    };
    config::set(&mut options, "quantization", quantization.map(PyValue).as_ref()).map_err(config_error)?;
    let logits = detach(py, || {
        let checkpoint = Checkpoint::open(&path)?;
        penstock_runner::logits(&checkpoint, &token_ids, &options, chunk).map_err(Error::Launch)
    })??;
    Ok(little_endian(py, &logits))
}

/// The probabilities of a request's next token for a row of logits; both are little-endian `f32`. There is no model
/// with defaults and no tokenizer; `mask` is that of a grammar, in words of 32 ids.
#[pyfunction]
#[pyo3(signature = (logits, params, *, prompt, generated = vec![], mask = None))]
pub fn probabilities<'py>(
    py: Python<'py>,
    logits: &[u8],
    params: &PySamplingParams,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    mask: Option<Vec<u32>>,
) -> Result<Bound<'py, PyBytes>, Error> {
    let (chunks, _) = logits.as_chunks::<4>();
    let logits: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let model = ModelLimits {
        generation: &GenerationConfig::default(),
        max_model_len: usize::MAX,
        vocabulary_size: logits.len(),
        hidden_size: 0,
        max_logprobs: u32::MAX,
        max_output_bytes: usize::MAX,
    };
    let resolved = params.params.resolve(&model, prompt.len(), 0).map_err(|error| params.error(error))?;
    let request = resolved.request(prompt.into());
    let probabilities = detach(py, || {
        penstock_runner::probabilities(request, &generated, &logits, mask.as_deref())
            .expect("no device is involved; this is a bug")
    })?;
    Ok(little_endian(py, &probabilities))
}

/// An engine in which every step fails that computes `failing_token`, or in which a row begins at `failing_position`,
/// and memory for the details of a row is refused from `refused_details` values on.
#[pyfunction]
#[pyo3(signature = (path, config, failing_token, failing_position, refused_details, cuda_folders))]
pub fn failing_engine(
    py: Python<'_>,
    path: PathBuf,
    config: &PyEngineConfig,
    failing_token: Option<u32>,
    failing_position: Option<u32>,
    refused_details: Option<usize>,
    cuda_folders: Vec<PathBuf>,
) -> Result<Engine, Error> {
    let faults =
        Faults { token: failing_token, position: failing_position, refused_details, ..Faults::default() };
    let runner_config = LaunchConfig { faults, ..config.with_environment(cuda_folders)? };
    Engine::load(py, ModelFiles::Path(path), runner_config, config, &Host::default(), None, None)
}

/// An engine whose device is lost in the first step that computes `losing_token`.
#[pyfunction]
pub fn losing_engine(
    py: Python<'_>,
    path: PathBuf,
    config: &PyEngineConfig,
    losing_token: u32,
) -> Result<Engine, Error> {
    let faults = Faults { losing_token: Some(losing_token), ..Faults::default() };
    let runner_config = LaunchConfig { faults, ..config.with_environment(Vec::new())? };
    Engine::load(py, ModelFiles::Path(path), runner_config, config, &Host::default(), None, None)
}

/// An engine with the executor of `fake_executor`.
#[pyfunction]
pub fn fake_engine(py: Python<'_>, path: PathBuf, config: &PyEngineConfig) -> Result<Engine, Error> {
    let engine = Engine::load(
        py,
        ModelFiles::Path(path),
        config.with_environment(Vec::new())?,
        config,
        &Host::default(),
        None,
        None,
    )?;
    engine.with_executor(|completions| Box::new(FakeExecutor::start(completions)))
}

/// Logs `count` records on a thread that is not attached to the interpreter, like the engine's threads.
#[pyfunction]
pub fn log_records(py: Python<'_>, level: &str, count: usize) -> Result<(), Error> {
    let level: log::Level = level.parse().expect("a log level; this is a bug");
    detach(py, || {
        let log = move || {
            (0..count)
                .for_each(|number| log::log!(target: "penstock_testing", level, "record {number} of a test"))
        };
        std::thread::scope(|scope| {
            scope.spawn(log);
        });
    })
}

/// A tensor by its Hugging Face name, dequantised, little-endian `f32`. Panics if the codes of a quantised tensor
/// do not have the same values.
#[pyfunction]
pub fn tensor<'py>(py: Python<'py>, path: PathBuf, name: &str) -> Result<Bound<'py, PyBytes>, Error> {
    let values = detach(py, || -> Result<_, Error> {
        let checkpoint = Checkpoint::open(&path)?;
        let tensor = checkpoint.tensor(name)?;
        let rows = tensor.rows();
        let mut values = vec![0.0; rows * tensor.columns()];
        tensor.read_rows(0..rows, &mut values);
        let WeightFormat::Grid(grid) = tensor.format() else { return Ok(values) };
        let (mut codes, mut row) = (GridRows::default(), vec![0.0; tensor.columns()]);
        tensor.read_grid(0..rows, &mut codes);
        for (at, values) in values.chunks_exact(tensor.columns()).enumerate() {
            codes.dequantize_row(&grid, values.len(), at, &mut row);
            assert_eq!(values, row, "row {at} of {name}");
        }
        Ok(values)
    })??;
    Ok(little_endian(py, &values))
}

fn little_endian<'py>(py: Python<'py>, values: &[f32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}
