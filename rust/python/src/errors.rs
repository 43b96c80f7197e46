//! Conversion of the errors of all crates to Python exceptions.
//!
//! The exception classes are defined in Python (`penstock/errors.py`) and are looked up by name.

use penstock_checkpoint::{CheckpointError, WriteError};
use penstock_engine::StartError;
use penstock_engine::limits::InvalidRequest;
use penstock_engine::request::{Rejection, StopCause};
use penstock_frontend::adapters::AdapterNotFound;
use penstock_runner::LaunchError;
use penstock_text::TextError;
use penstock_types::FieldError;
use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

use crate::fields::quote;

/// Ends slow work when its thread can no longer attach to the interpreter. It never reaches Python code.
pub fn exiting() -> PyErr {
    PyRuntimeError::new_err("the interpreter is exiting")
}

/// An invalid field of a configuration or of a request.
pub struct Problem {
    /// The complete error message.
    pub message: String,
    /// The name of the field in the Python API.
    pub field: String,
    pub value: Option<Py<PyAny>>,
    /// The allowed values, in words.
    pub limit: Option<String>,
}

impl Problem {
    /// The error for a value; `place` is the field, with the index of an item.
    pub fn new(field: &str, place: &str, value: &Bound<'_, PyAny>, limit: String) -> Self {
        let message = format!("{place}={} is not allowed: it must be {limit}", quote(value));
        Self { message, field: field.to_owned(), value: Some(value.clone().unbind()), limit: Some(limit) }
    }

    /// The error of a schema that is not supported. The message has the cause in place of the schema.
    pub fn of_schema(field: &str, message: String, value: Option<Py<PyAny>>) -> Self {
        Self { message, field: field.to_owned(), value, limit: Some("a supported schema".to_owned()) }
    }
}

impl From<FieldError> for Problem {
    /// Without the value, which is text here.
    fn from(error: FieldError) -> Self {
        Self {
            message: error.to_string(),
            field: error.field.to_owned(),
            value: None,
            limit: Some(error.limit),
        }
    }
}

/// An error of this crate or of a crate below it.
pub enum Error {
    /// An invalid field of `EngineConfig`.
    Config(Problem),
    /// An invalid field of a request.
    Request(Problem),
    /// The files of the model cannot be used.
    Checkpoint(CheckpointError),
    /// The file of the tokenizer cannot be used, or there is no memory for a text.
    Text(TextError),
    /// The model could not be opened.
    Launch(LaunchError),
    /// An adapter does not have this name.
    AdapterNotFound(AdapterNotFound),
    /// The files of an adapter cannot be used.
    AdapterFiles(String),
    /// Another adapter has the name.
    AdapterConflict(String),
    /// As many adapters as may be are loaded.
    AdapterLimit(String),
    /// The request could not be submitted.
    Start(StartError),
    /// The engine rejected the request, which names this adapter.
    Rejected(Rejection, Option<String>),
    /// A queue is full; the reason names it.
    Overloaded(String),
    /// The engine has stopped, for this reason.
    Stopped(String),
    /// The request failed while it ran.
    Failed(String),
    /// A panic, which is a bug.
    Defect(String),
    /// An exception of Python code that this crate called.
    Python(PyErr),
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Error::Python(error)
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        Error::Checkpoint(error)
    }
}

impl From<TextError> for Error {
    fn from(error: TextError) -> Self {
        Error::Text(error)
    }
}

impl From<penstock_frontend::Error> for Error {
    fn from(error: penstock_frontend::Error) -> Self {
        match error {
            penstock_frontend::Error::Field(error) => Error::Request(error.into()),
            penstock_frontend::Error::Prompt(error @ TextError::OutOfMemory { .. }) => Error::Text(error),
            penstock_frontend::Error::Prompt(error) => Error::Request(Problem {
                message: error.to_string(),
                field: "prompt".to_owned(),
                value: None,
                limit: Some(match error {
                    TextError::TooManyTokens { max_tokens } => format!("at most {max_tokens} tokens"),
                    _ => "text that the tokenizer can encode".to_owned(),
                }),
            }),
            error @ penstock_frontend::Error::TextTooLong { bytes, limit, .. } => {
                let value =
                    Python::attach(|py| bytes.into_pyobject(py).map(|bytes| bytes.into_any().unbind()).ok());
                let limit = Some(format!("at most {limit} bytes"));
                Error::Request(Problem {
                    message: error.to_string(),
                    field: "prompt".to_owned(),
                    value,
                    limit,
                })
            }
            error @ penstock_frontend::Error::TooManyTokens { counted, limit, .. } => {
                let value = format!("more than {counted}");
                let value =
                    Python::attach(|py| value.into_pyobject(py).map(|value| value.into_any().unbind()).ok());
                let limit = Some(format!("at most {limit} tokens"));
                Error::Request(Problem {
                    message: error.to_string(),
                    field: "prompt".to_owned(),
                    value,
                    limit,
                })
            }
            penstock_frontend::Error::UnsupportedSchema { field, .. } => {
                Error::Request(Problem::of_schema(field, error.to_string(), None))
            }
            penstock_frontend::Error::Text(error) => Error::Text(error),
            penstock_frontend::Error::Overloaded(reason) => Error::Overloaded(reason),
            penstock_frontend::Error::Adapter(error) => Error::AdapterNotFound(error),
            penstock_frontend::Error::Start(error) => Error::Start(error),
        }
    }
}

impl From<LaunchError> for Error {
    fn from(error: LaunchError) -> Self {
        Error::Launch(error)
    }
}

impl From<StopCause> for Error {
    fn from(cause: StopCause) -> Self {
        Error::Stopped(cause.to_string())
    }
}

impl From<StartError> for Error {
    fn from(error: StartError) -> Self {
        Error::Start(error)
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        Python::attach(|py| match error {
            Error::Python(error) => error,
            Error::Config(problem) => field_error(py, "ConfigError", problem),
            Error::Request(problem) => field_error(py, "InvalidRequestError", problem),
            Error::Launch(LaunchError::Config(error)) => {
                let value = error.value.as_str().into_pyobject(py).map(|text| text.into_any().unbind()).ok();
                field_error(py, "ConfigError", Problem { value, ..error.into() })
            }
            Error::Launch(error @ LaunchError::OutOfMemory(_)) => {
                plain(py, "OutOfMemoryError", error.to_string())
            }
            Error::Launch(error @ LaunchError::DeviceUnavailable(_)) => {
                plain(py, "DeviceUnavailableError", error.to_string())
            }
            Error::Launch(error @ LaunchError::Start(_)) => plain(py, "PenstockError", error.to_string()),
            Error::Launch(LaunchError::Write(WriteError::Io { path, source })) => {
                let text = source.to_string();
                let text = text.split(" (os error").next().unwrap_or_default().to_owned();
                PyOSError::new_err((source.raw_os_error(), text, path))
            }
            Error::Launch(error) => plain(py, "ModelLoadError", error.to_string()),
            Error::Checkpoint(error) => plain(py, "ModelLoadError", error.to_string()),
            Error::Text(error @ TextError::OutOfMemory { .. }) => {
                plain(py, "OutOfMemoryError", error.to_string())
            }
            Error::Text(error) => plain(py, "ModelLoadError", error.to_string()),
            Error::Start(StartError::Invalid(error)) => {
                field_error(py, "InvalidRequestError", invalid(py, &error))
            }
            Error::Start(StartError::Overloaded) => {
                plain(py, "OverloadedError", "the engine's mailbox is full; try again later".to_owned())
            }
            Error::Start(error @ StartError::OutputMemory { .. }) => {
                plain(py, "OverloadedError", error.to_string())
            }
            Error::Start(StartError::Stopped(cause)) | Error::Rejected(Rejection::Stopped(cause), _) => {
                plain(py, "EngineStoppedError", cause.to_string())
            }
            Error::Stopped(reason) => plain(py, "EngineStoppedError", reason),
            Error::Overloaded(reason) => plain(py, "OverloadedError", format!("{reason}; try again later")),
            Error::Rejected(Rejection::Overloaded { waiting, limit }, _) => {
                let message = format!(
                    "{waiting} requests wait; the limit is {limit}, from max_waiting; try again later"
                );
                plain(py, "OverloadedError", message)
            }
            Error::Rejected(Rejection::TooManyPreempted { waiting, limit }, _) => {
                let message = format!(
                    "{waiting} requests wait, preempted ones included; the limit is {limit}, from max_waiting and \
                     max_num_seqs; try again later"
                );
                plain(py, "OverloadedError", message)
            }
            Error::Rejected(Rejection::UnknownAdapter { num_adapters }, adapter) => {
                let name = adapter.unwrap_or_default();
                adapter_not_found(py, AdapterNotFound { name, names: Vec::new(), num_loaded: num_adapters })
            }
            Error::AdapterNotFound(error) => adapter_not_found(py, error),
            Error::AdapterFiles(message) => plain(py, "AdapterLoadError", message),
            Error::AdapterConflict(message) => plain(py, "AdapterConflictError", message),
            Error::AdapterLimit(message) => plain(py, "AdapterLimitError", message),
            Error::Rejected(Rejection::TooManyUnfinished { unfinished, choices, limit }, _) => {
                let message = format!(
                    "{unfinished} outputs are unfinished, and the request has {choices}; the limit is {limit}, from \
                     max_unfinished; try again later"
                );
                plain(py, "OverloadedError", message)
            }
            Error::Rejected(Rejection::TooLate { least, left }, _) => {
                let message = format!(
                    "the request cannot end before its deadline: it and the prompts before it take at least {:.1} s, \
                     and {:.1} s are left; try again later",
                    least.as_secs_f64(),
                    left.as_secs_f64()
                );
                plain(py, "DeadlineError", message)
            }
            Error::Failed(reason) => plain(py, "GenerationError", reason),
            Error::Defect(message) => {
                plain(py, "PenstockError", format!("{message}; this is a bug in penstock"))
            }
        })
    }
}

/// The engine's error with the name of the field in the Python API.
fn invalid(py: Python<'_>, error: &InvalidRequest) -> Problem {
    let number = |number: usize| number.into_pyobject(py).map(|number| number.into_any().unbind()).ok();
    let (field, value, limit) = match error {
        InvalidRequest::EmptyPrompt => ("prompt", number(0), "at least one token".to_owned()),
        InvalidRequest::UnknownToken { token, vocabulary_size, .. } => {
            ("prompt", number(*token as usize), format!("token ids from 0 to {}", vocabulary_size - 1))
        }
        InvalidRequest::PromptTooLong { prompt, limit, .. } => {
            ("prompt", number(*prompt), format!("at most {limit} tokens"))
        }
        InvalidRequest::NeverFits { max_tokens, available, .. } => {
            ("max_tokens", number(*max_tokens), format!("at most the tokens that {available} KV blocks hold"))
        }
        InvalidRequest::Field(FieldError { field, value, limit }) => {
            let value = value.into_pyobject(py).map(|text| text.into_any().unbind()).ok();
            (*field, value, limit.clone())
        }
    };
    Problem { message: error.to_string(), field: field.to_owned(), value, limit: Some(limit) }
}

fn adapter_not_found(py: Python<'_>, error: AdapterNotFound) -> PyErr {
    let message = error.to_string();
    let value = error.name.into_pyobject(py).map(|name| name.into_any().unbind()).ok();
    let limit = match error.names.as_slice() {
        [] => format!("one of the {} loaded adapters", error.num_loaded),
        names => format!("one of {names:?}"),
    };
    let problem = Problem { message, field: "adapter".to_owned(), value, limit: Some(limit) };
    field_error(py, "AdapterNotFoundError", problem)
}

fn field_error(py: Python<'_>, class: &str, problem: Problem) -> PyErr {
    let Problem { message, field, value, limit } = problem;
    instance(py, class, |class| class.call1((message, field, value, limit)))
}

fn plain(py: Python<'_>, class: &str, message: String) -> PyErr {
    instance(py, class, |class| class.call1((message,)))
}

/// An exception of a class of `penstock.errors`, or the error that occurred while creating it.
fn instance<'py>(
    py: Python<'py>,
    class: &str,
    make: impl FnOnce(Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyErr {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = ERRORS.get_or_try_init(py, || PyModule::import(py, "penstock.errors").map(Bound::unbind));
    let exception = module.and_then(|module| make(module.bind(py).getattr(class)?));
    exception.map_or_else(|error| error, PyErr::from_value)
}
