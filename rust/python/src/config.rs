//! `EngineConfig`: what a user may choose when a model is opened, checked field by field when built; and the one place
//! where the environment is read.

use std::path::PathBuf;
use std::time::Duration;

use penstock_runner::{LaunchError, Options, PreemptionMode};
use penstock_types::{Dtype, KvDtype};
use pyo3::prelude::*;

use crate::errors::{Error, Problem};
use crate::fields::Field;
use crate::record::options;

/// Number of compute threads where `threads` is not given.
const THREADS_VARIABLE: &str = "PENSTOCK_THREADS";
/// Share of the memory where `memory_ratio` is not given; the second name is DashInfer's.
const RATIO_VARIABLES: [&str; 2] = ["PENSTOCK_MEMORY_RATIO", "BFC_MEM_RATIO"];
/// Mebibytes that are left to others before the share is taken; DashInfer's name.
const LEFTOVER_VARIABLE: &str = "BFC_LEFTOVER_MB";
/// Most compute threads; beyond any machine this runs on.
const MAX_THREADS: u64 = 1024;
/// How long what nobody uses is kept where `prefix_cache_ttl` is not given, in seconds.
const DEFAULT_TTL: f64 = 300.0;
/// The longest time to live; about 30 years.
const MAX_TTL: f64 = 1e9;
const MAX_BYTES: u64 = i64::MAX as u64;
/// Most tokens that are guessed ahead of a sequence in one step.
const MAX_DRAFTS: u64 = 32;
/// How many where that is not said.
const DEFAULT_DRAFTS: usize = 8;
const TOOL_PARSERS: [&str; 5] = ["auto", "none", "hermes", "llama3_json", "mistral"];
const REASONING_PARSERS: [&str; 3] = ["auto", "none", "think"];

options! {
    /// See `_core.pyi`. `None` and `"auto"` mean that the engine chooses.
    EngineConfig(Field::config, check_options) {
        device: String = auto, read_device;
        dtype: String = auto, read_element;
        threads: Option<usize> = None, read_threads;
        max_model_len: Option<usize> = None, Field::count;
        max_num_seqs: Option<usize> = None, Field::count;
        max_num_batched_tokens: Option<usize> = None, Field::count;
        max_waiting: Option<usize> = None, Field::count;
        block_size: Option<usize> = None, Field::count;
        kv_cache_dtype: String = auto, read_kv_element;
        kv_cache_bytes: Option<u64> = None, |field: Field, value| field.integer(value, 1..=MAX_BYTES);
        memory_ratio: Option<f64> = None, read_ratio;
        prefix_cache: bool = true, Field::boolean;
        prefix_cache_ttl: Option<f64> = None, read_ttl;
        host_cache_bytes: Option<u64> = None, |field: Field, value| field.integer(value, 0..=MAX_BYTES);
        preemption_mode: String = recompute, read_on_exhaustion;
        tokenizer: Option<String> = None, read_tokenizer;
        speculation: Option<String> = None, |field: Field, value| field.choice(value, &["ngram"]).map(str::to_owned);
        num_speculative_tokens: Option<usize> = None, read_num_drafts;
        tool_parser: String = auto, |field: Field, value| field.choice(value, &TOOL_PARSERS);
        reasoning_parser: String = auto, |field: Field, value| field.choice(value, &REASONING_PARSERS);
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
    let names = Dtype::ALL.iter().map(|dtype| dtype.name());
    field.choice(value, &std::iter::once("auto").chain(names).collect::<Vec<_>>())
}

fn read_threads(field: Field, value: &Bound<'_, PyAny>) -> Result<usize, Error> {
    field.integer(value, 1..=MAX_THREADS).map(|count| count as usize)
}

fn read_kv_element(field: Field, value: &Bound<'_, PyAny>) -> Result<&'static str, Error> {
    let names = KvDtype::ALL.iter().map(|dtype| dtype.name());
    field.choice(value, &std::iter::once("auto").chain(names).collect::<Vec<_>>())
}

fn read_ratio(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    field.number(value, RATIO_LIMIT, is_ratio)
}

const RATIO_LIMIT: &str = "a number above 0 and at most 1";

fn is_ratio(number: f64) -> bool {
    number > 0.0 && number <= 1.0
}

fn read_ttl(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    // What rounds to no time at all is no time.
    let allowed = |seconds: f64| (1e-9..=MAX_TTL).contains(&seconds);
    field.number(value, "a number of seconds above 0 and at most 1e9", allowed)
}

fn read_on_exhaustion(field: Field, value: &Bound<'_, PyAny>) -> Result<&'static str, Error> {
    field.choice(value, &["recompute", "swap", "interrupt"])
}

/// What the fields are together; what the model has to say comes later.
fn check_options(config: &EngineConfig) -> Result<(), Error> {
    let refuse = |field: &'static str, limit: String| {
        Python::attach(|py| {
            let value = Bound::new(py, config.clone())?.getattr(field)?;
            Err(Field::config(field).refuse(&value, limit))
        })
    };
    if !config.prefix_cache && config.prefix_cache_ttl.is_some() {
        return refuse("prefix_cache_ttl", "left out where prefix_cache is False".to_owned());
    }
    if config.speculation.is_none() && config.num_speculative_tokens.is_some() {
        return refuse("num_speculative_tokens", "left out where speculation is None".to_owned());
    }
    match config.given().check() {
        Err(LaunchError::Option { field, limit, .. }) => refuse(field, limit),
        checked => checked.map_err(Error::Launch),
    }
}

fn read_num_drafts(field: Field, value: &Bound<'_, PyAny>) -> Result<usize, Error> {
    field.integer(value, 1..=MAX_DRAFTS).map(|count| count as usize)
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
            memory_ratio: self.memory_ratio.map_or_else(ratio_from_environment, |ratio| Ok(Some(ratio)))?,
            memory_leftover_bytes: from_environment(
                LEFTOVER_VARIABLE,
                "a whole number of mebibytes",
                |text| text.parse::<u64>().ok()?.checked_mul(1 << 20),
            )?,
            ..self.given()
        })
    }

    fn given(&self) -> Options {
        let ttl = Duration::from_secs_f64(self.prefix_cache_ttl.unwrap_or(DEFAULT_TTL));
        Options {
            threads: self.threads,
            dtype: Dtype::from_name(&self.dtype),
            kv_cache_dtype: KvDtype::from_name(&self.kv_cache_dtype),
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_waiting: self.max_waiting,
            block_size: self.block_size,
            kv_cache_bytes: self.kv_cache_bytes,
            memory_ratio: self.memory_ratio,
            memory_leftover_bytes: None,
            prefix_cache_ttl: self.prefix_cache.then_some(ttl),
            host_cache_bytes: self.host_cache_bytes,
            preemption_mode: match self.preemption_mode.as_str() {
                "swap" => PreemptionMode::Swap,
                "interrupt" => PreemptionMode::Interrupt,
                _ => PreemptionMode::Recompute,
            },
            num_speculative_tokens: match self.speculation {
                Some(_) => self.num_speculative_tokens.unwrap_or(DEFAULT_DRAFTS),
                None => 0,
            },
            failing_token: None,
        }
    }
}

fn threads_from_environment() -> Result<Option<usize>, Error> {
    from_environment(THREADS_VARIABLE, &format!("an integer from 1 to {MAX_THREADS}"), |text| {
        text.parse()
            .ok()
            .filter(|threads| (1..=MAX_THREADS).contains(threads))
            .map(|threads| threads as usize)
    })
}

/// Of the first variable that is set.
fn ratio_from_environment() -> Result<Option<f64>, Error> {
    for variable in RATIO_VARIABLES {
        let ratio = from_environment(variable, RATIO_LIMIT, |text| {
            text.parse().ok().filter(|ratio| is_ratio(*ratio))
        });
        if !matches!(ratio, Ok(None)) {
            return ratio;
        }
    }
    Ok(None)
}

/// What `parse` makes of a variable; `None` where it is not set. `limit` completes the sentence "it must be ...".
fn from_environment<T>(
    variable: &str,
    limit: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, Error> {
    let Some(value) = std::env::var_os(variable) else { return Ok(None) };
    let parsed = value.to_str().and_then(parse);
    parsed.map(Some).ok_or_else(|| {
        let message = format!("{variable}={value:?} is not allowed: it must be {limit}");
        Error::Config(Problem {
            message,
            field: variable.to_owned(),
            value: None,
            limit: Some(limit.to_owned()),
        })
    })
}
