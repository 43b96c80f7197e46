//! `EngineConfig`: what a user may choose when a model is opened, checked field by field when built; and the one place
//! where the environment is read.

use std::path::PathBuf;

use penstock_runner::{Element, KvElement, Options};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{Error, Problem};
use crate::fields::Field;
use crate::record;

/// Number of compute threads where `threads` is not given.
const THREADS_VARIABLE: &str = "PENSTOCK_THREADS";
/// Most compute threads; beyond any machine this runs on.
const MAX_THREADS: u64 = 1024;

const FIELDS: &[&str] = &[
    "device",
    "dtype",
    "threads",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_waiting",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_bytes",
    "tokenizer",
];

/// See `_core.pyi`. `None` and `"auto"` mean that the engine chooses.
#[pyclass(frozen, eq, get_all, module = "penstock", skip_from_py_object)]
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    pub device: String,
    pub dtype: String,
    pub threads: Option<usize>,
    pub max_model_len: Option<usize>,
    pub max_num_seqs: Option<usize>,
    pub max_num_batched_tokens: Option<usize>,
    pub max_waiting: Option<usize>,
    pub block_size: Option<usize>,
    pub kv_cache_dtype: String,
    pub kv_cache_bytes: Option<u64>,
    pub tokenizer: Option<String>,
}

#[pymethods]
impl EngineConfig {
    #[new]
    #[pyo3(signature = (
        *,
        device = None,
        dtype = None,
        threads = None,
        max_model_len = None,
        max_num_seqs = None,
        max_num_batched_tokens = None,
        max_waiting = None,
        block_size = None,
        kv_cache_dtype = None,
        kv_cache_bytes = None,
        tokenizer = None,
    ), text_signature = "(*, device='auto', dtype='auto', threads=None, max_model_len=None, max_num_seqs=None, max_num_batched_tokens=None, max_waiting=None, block_size=None, kv_cache_dtype='auto', kv_cache_bytes=None, tokenizer=None)")]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, one a field")]
    fn new(
        device: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        threads: Option<&Bound<'_, PyAny>>,
        max_model_len: Option<&Bound<'_, PyAny>>,
        max_num_seqs: Option<&Bound<'_, PyAny>>,
        max_num_batched_tokens: Option<&Bound<'_, PyAny>>,
        max_waiting: Option<&Bound<'_, PyAny>>,
        block_size: Option<&Bound<'_, PyAny>>,
        kv_cache_dtype: Option<&Bound<'_, PyAny>>,
        kv_cache_bytes: Option<&Bound<'_, PyAny>>,
        tokenizer: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self, Error> {
        let count = |name, value: Option<&Bound<'_, PyAny>>| {
            value.map(|value| Field::config(name).count(value)).transpose()
        };
        let element = |name, value: Option<&Bound<'_, PyAny>>, names: &[&'static str]| {
            let element = value.map_or(Ok("auto"), |value| Field::config(name).choice(value, names));
            element.map(str::to_owned)
        };
        let names = &["auto", "float32", "float16", "bfloat16", "int8", "uint4"];
        Ok(Self {
            device: device.map_or(Ok("auto".to_owned()), device_name)?,
            dtype: element("dtype", dtype, &names[..4])?,
            threads: threads
                .map(|value| {
                    Field::config("threads").integer(value, 1..=MAX_THREADS).map(|count| count as usize)
                })
                .transpose()?,
            max_model_len: count("max_model_len", max_model_len)?,
            max_num_seqs: count("max_num_seqs", max_num_seqs)?,
            max_num_batched_tokens: count("max_num_batched_tokens", max_num_batched_tokens)?,
            max_waiting: count("max_waiting", max_waiting)?,
            block_size: count("block_size", block_size)?,
            kv_cache_dtype: element("kv_cache_dtype", kv_cache_dtype, names)?,
            kv_cache_bytes: kv_cache_bytes
                .map(|value| Field::config("kv_cache_bytes").integer(value, 1..=i64::MAX as u64))
                .transpose()?,
            tokenizer: tokenizer.map(tokenizer_path).transpose()?,
        })
    }

    /// A copy with some fields changed.
    #[pyo3(signature = (**changes))]
    fn replace<'py>(
        this: &Bound<'py, Self>,
        changes: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        record::replace(this.as_any(), FIELDS, changes)
    }

    fn __repr__(this: &Bound<'_, Self>) -> PyResult<String> {
        record::repr(this.as_any(), FIELDS)
    }

    fn __hash__(this: &Bound<'_, Self>) -> PyResult<isize> {
        record::hash(this.as_any(), FIELDS)
    }
}

fn device_name(value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let field = Field::config("device");
    let name = field.text(value)?;
    match name.as_str() {
        "auto" | "cpu" => Ok(name),
        cuda if cuda.split(':').next() == Some("cuda") => {
            Err(field.refuse(value, "'auto' or 'cpu': this build of penstock has no CUDA backend"))
        }
        _ => Err(field.refuse(value, "'auto' or 'cpu'")),
    }
}

fn tokenizer_path(value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let field = Field::config("tokenizer");
    let path: PathBuf = value.extract().map_err(|_| field.refuse(value, "a path"))?;
    path.into_os_string().into_string().map_err(|_| field.refuse(value, "a path that is valid Unicode"))
}

impl EngineConfig {
    /// The runner's options, with what the environment says where a field was not given.
    pub fn options(&self) -> Result<Options, Error> {
        Ok(Options {
            threads: self.threads.map_or_else(threads_from_environment, |threads| Ok(Some(threads)))?,
            dtype: element(&self.dtype),
            kv_cache_dtype: kv_element(&self.kv_cache_dtype),
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_waiting: self.max_waiting,
            block_size: self.block_size,
            kv_cache_bytes: self.kv_cache_bytes,
        })
    }
}

fn threads_from_environment() -> Result<Option<usize>, Error> {
    let Some(value) = std::env::var_os(THREADS_VARIABLE) else { return Ok(None) };
    let threads = value.to_str().and_then(|text| text.parse().ok());
    threads
        .filter(|threads| (1..=MAX_THREADS).contains(threads))
        .map(|threads| Some(threads as usize))
        .ok_or_else(|| {
            let limit = format!("an integer from 1 to {MAX_THREADS}");
            let message = format!("{THREADS_VARIABLE}={value:?} is not allowed: it must be {limit}");
            Error::Config(Problem {
                message,
                field: THREADS_VARIABLE.to_owned(),
                value: None,
                limit: Some(limit),
            })
        })
}

/// How users spell the types of the KV cache.
const KV_ELEMENTS: &[(&str, KvElement)] = &[
    ("float32", KvElement::F32),
    ("float16", KvElement::F16),
    ("bfloat16", KvElement::Bf16),
    ("int8", KvElement::Int8),
    ("uint4", KvElement::Uint4),
];

/// The type of the KV cache of a name; `None` for `auto`.
pub fn kv_element(name: &str) -> Option<KvElement> {
    KV_ELEMENTS.iter().find(|(known, _)| *known == name).map(|(_, element)| *element)
}

/// The name of a type of the KV cache as users know it.
pub fn kv_element_name(element: KvElement) -> &'static str {
    let known = KV_ELEMENTS.iter().find(|(_, other)| *other == element);
    known.expect("every type has a name; this is a bug").0
}

/// The element type of a name; `None` for `auto`.
pub fn element(name: &str) -> Option<Element> {
    [Element::F32, Element::F16, Element::Bf16].into_iter().find(|element| element_name(*element) == name)
}

/// The element type's name as users know it.
pub fn element_name(element: Element) -> &'static str {
    match element {
        Element::F32 => "float32",
        Element::F16 => "float16",
        Element::Bf16 => "bfloat16",
    }
}
