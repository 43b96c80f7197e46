//! Private hooks of the test-suite: numbers straight from the model, past engine and sampler, and
//! the sampler's without a model; steps that fail; log records.

use std::path::PathBuf;

use penstock_checkpoint::{Checkpoint, GenerationConfig};
use penstock_runner::Options;
use penstock_types::{Dtype, KvDtype};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::config::EngineConfig;
use crate::detach::detach;
use crate::engine::Engine;
use crate::errors::Error;
use crate::params::SamplingParams;
use crate::resolve::Target;

/// Logits after each token, little-endian `f32` of shape `[tokens, vocabulary]`.
#[pyfunction]
#[pyo3(signature = (path, token_ids, *, dtype = "float32", kv_cache_dtype = "auto", threads = 1, chunk = 512))]
pub fn testing_logits<'py>(
    py: Python<'py>,
    path: PathBuf,
    token_ids: Vec<u32>,
    dtype: &str,
    kv_cache_dtype: &str,
    threads: usize,
    chunk: usize,
) -> Result<Bound<'py, PyBytes>, Error> {
    let options = Options {
        dtype: Dtype::from_name(dtype),
        kv_cache_dtype: KvDtype::from_name(kv_cache_dtype),
        threads: Some(threads),
        ..Options::default()
    };
    let logits = detach(py, || {
        let checkpoint = Checkpoint::open(&path)?;
        penstock_runner::logits(&checkpoint, &token_ids, &options, chunk).map_err(Error::Launch)
    })??;
    Ok(little_endian(py, &logits))
}

/// The probabilities that a request's next token would be drawn with, as a row of logits becomes them; both are
/// little-endian `f32`. No model is there to have defaults, or a tokenizer, so bad words are ids; `mask` is a grammar's, in words
/// of 32 ids.
#[pyfunction]
#[pyo3(signature = (logits, params, *, prompt, generated = vec![], bad_words = vec![], mask = None))]
pub fn testing_probabilities<'py>(
    py: Python<'py>,
    logits: &[u8],
    params: &SamplingParams,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    bad_words: Vec<Vec<u32>>,
    mask: Option<Vec<u32>>,
) -> Result<Bound<'py, PyBytes>, Error> {
    let (chunks, _) = logits.as_chunks::<4>();
    let logits: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let target = Target {
        generation: &GenerationConfig::default(),
        max_model_len: usize::MAX,
        vocabulary_size: logits.len(),
        hidden_size: 0,
    };
    let params = params.resolve(&target, prompt.len(), 0)?;
    let mut request = params.request(prompt.into(), &target);
    request.sampling.bad_words = bad_words;
    let probabilities = detach(py, || {
        penstock_runner::probabilities(request, &generated, &logits, mask.as_deref())
            .expect("no device is asked; this is a bug")
    })?;
    Ok(little_endian(py, &probabilities))
}

/// An engine in which every step that computes `failing_token` fails.
#[pyfunction]
pub fn testing_failing_engine(
    py: Python<'_>,
    path: PathBuf,
    config: &EngineConfig,
    failing_token: u32,
) -> Result<Engine, Error> {
    let options = Options { failing_token: Some(failing_token), ..config.options()? };
    Engine::load(py, path, options, config, None)
}

/// An engine that computes nothing and makes up tokens and reports, as `inventor` says.
#[pyfunction]
pub fn testing_inventing_engine(
    py: Python<'_>,
    path: PathBuf,
    config: &EngineConfig,
) -> Result<Engine, Error> {
    Engine::load(py, path, config.options()?, config, None)?.with_invented_reports()
}

/// Logs `count` records on a thread that the interpreter does not know, as an engine's threads do.
#[pyfunction]
pub fn testing_log(py: Python<'_>, level: &str, count: usize) -> Result<(), Error> {
    let level: log::Level = level.parse().expect("the test names a level; this is a bug");
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

/// A tensor by its Hugging Face name, dequantised, little-endian `f32`.
#[pyfunction]
pub fn testing_tensor<'py>(py: Python<'py>, path: PathBuf, name: &str) -> Result<Bound<'py, PyBytes>, Error> {
    let values = detach(py, || -> Result<_, Error> {
        let checkpoint = Checkpoint::open(&path)?;
        let tensor = checkpoint.tensor(name)?;
        let rows = tensor.rows();
        let mut values = vec![0.0; rows * tensor.columns()];
        tensor.read_rows(0..rows, &mut values);
        Ok(values)
    })??;
    Ok(little_endian(py, &values))
}

fn little_endian<'py>(py: Python<'py>, values: &[f32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}
