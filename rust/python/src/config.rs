//! `EngineConfig`: what a user may choose when a model is opened, checked field by field when built; and the one place
//! where the environment is read.

use std::path::PathBuf;

use penstock_runner::{Element, KvElement, Options};
use pyo3::prelude::*;

use crate::errors::{Error, Problem};
use crate::fields::Field;
use crate::record::options;

/// Number of compute threads where `threads` is not given.
const THREADS_VARIABLE: &str = "PENSTOCK_THREADS";
/// Most compute threads; beyond any machine this runs on.
const MAX_THREADS: u64 = 1024;

options! {
    /// See `_core.pyi`. `None` and `"auto"` mean that the engine chooses.
    EngineConfig(Field::config) {
        device: String = auto, read_device;
        dtype: String = auto, read_element;
        threads: Option<usize> = None, read_threads;
        max_model_len: Option<usize> = None, Field::count;
        max_num_seqs: Option<usize> = None, Field::count;
        max_num_batched_tokens: Option<usize> = None, Field::count;
        max_waiting: Option<usize> = None, Field::count;
        block_size: Option<usize> = None, Field::count;
        kv_cache_dtype: String = auto, read_element;
        kv_cache_bytes: Option<u64> = None, read_bytes;
        tokenizer: Option<String> = None, read_tokenizer;
    }
}

fn read_device(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let name = field.text(value)?;
    match name.as_str() {
        "auto" | "cpu" => Ok(name),
        cuda if cuda.split(':').next() == Some("cuda") => {
            Err(field.refuse(value, "'auto' or 'cpu': this build of penstock has no CUDA backend"))
        }
        _ => Err(field.refuse(value, "'auto' or 'cpu'")),
    }
}

fn read_element(field: Field, value: &Bound<'_, PyAny>) -> Result<&'static str, Error> {
    field.choice(value, &["auto", "float32", "float16", "bfloat16"])
}

fn read_threads(field: Field, value: &Bound<'_, PyAny>) -> Result<usize, Error> {
    field.integer(value, 1..=MAX_THREADS).map(|count| count as usize)
}

fn read_bytes(field: Field, value: &Bound<'_, PyAny>) -> Result<u64, Error> {
    field.integer(value, 1..=i64::MAX as u64)
}

fn read_tokenizer(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
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
            failing_token: None,
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
const KV_ELEMENTS: &[(&str, KvElement)] =
    &[("float32", KvElement::F32), ("float16", KvElement::F16), ("bfloat16", KvElement::Bf16)];

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
