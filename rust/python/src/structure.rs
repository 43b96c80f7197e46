//! What an answer must look like, in OpenAI's words: `response_format`, `tools` and `tool_choice`. Read once; what a
//! user gets back is the JSON that was given.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyString, PyTuple};

use crate::errors::Error;
use crate::fields::{Field, quote};
use crate::json::Json;
use crate::strictness::closed;

/// Most tools of a request.
const MAX_TOOLS: usize = 128;
/// Most characters of a tool's name.
const MAX_NAME_CHARS: usize = 128;
/// The schema of the arguments of a tool that has no `parameters`.
const NO_PARAMETERS: &str = r#"{"type":"object","properties":{},"additionalProperties":false}"#;

/// `response_format`.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseFormat {
    pub kind: ResponseKind,
    given: Json,
}

/// What a response is.
#[derive(Clone, Debug, PartialEq)]
pub enum ResponseKind {
    /// Any text.
    Text,
    /// Any JSON object.
    Object,
    /// JSON that is valid under this schema.
    Schema(Json),
}

/// `tools`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    pub functions: Vec<Function>,
    given: Json,
}

/// A tool that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    pub name: String,
    /// The schema of its arguments, as JSON text.
    pub parameters: String,
}

/// `tool_choice`: whether tools are called.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolChoice {
    /// None is.
    None,
    /// The model decides.
    Auto,
    /// At least one is.
    Required,
    /// This one is.
    Function { name: String, given: Json },
}

impl ResponseFormat {
    pub fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let kinds = "a mapping whose type is 'text', 'json_object' or 'json_schema'";
        let refuse = || field.refuse(value, kinds);
        let format = value.cast::<PyDict>().map_err(|_| refuse())?;
        let named = format.get_item("type")?;
        let kind = match named.as_ref().and_then(|name| name.extract::<&str>().ok()) {
            Some("text") => ResponseKind::Text,
            Some("json_object") => ResponseKind::Object,
            Some("json_schema") => ResponseKind::Schema(read_schema(field, format)?),
            _ => return Err(refuse()),
        };
        let is_schema = matches!(kind, ResponseKind::Schema(_));
        check_keys(field, format, if is_schema { &["type", "json_schema"] } else { &["type"] })?;
        Ok(Self { kind, given: Json::read(field, value)? })
    }
}

/// What a mapping says in words nobody knows would do nothing.
fn check_keys(field: Field, mapping: &Bound<'_, PyDict>, known: &[&str]) -> Result<(), Error> {
    let is_unknown = |key: &Bound<'_, PyAny>| !key.extract::<&str>().is_ok_and(|key| known.contains(&key));
    match mapping.keys().iter().find(is_unknown) {
        Some(key) => {
            let known: Vec<_> = known.iter().map(|key| format!("'{key}'")).collect();
            let limit = format!("one without {}: its keys are {}", quote(&key), known.join(", "));
            Err(field.refuse(mapping, limit))
        }
        None => Ok(()),
    }
}

/// The schema lies in `json_schema`, beside its name, or is what lies there.
fn read_schema(field: Field, format: &Bound<'_, PyDict>) -> Result<Json, Error> {
    let limit = "one with a schema in 'json_schema', on its own or as its 'schema'";
    let refuse = || field.refuse(format, limit);
    let holder = format.get_item("json_schema")?.and_then(|holder| holder.cast_into::<PyDict>().ok());
    let holder = holder.ok_or_else(refuse)?;
    let (schema, is_strict) = match holder.get_item("schema")? {
        Some(schema) => {
            check_keys(field, &holder, &["name", "description", "schema", "strict"])?;
            (schema, is_strict(field, &holder)?)
        }
        None if holder.contains("name")? && !holder.contains("type")? => return Err(refuse()),
        None => (holder.into_any(), false),
    };
    if !schema.is_instance_of::<PyDict>() {
        return Err(refuse());
    }
    let schema = Json::read(field, &schema)?;
    Ok(if is_strict { Json(closed(&schema.0)) } else { schema })
}

/// The `strict` beside a schema.
fn is_strict(field: Field, holder: &Bound<'_, PyDict>) -> Result<bool, Error> {
    match holder.get_item("strict")?.filter(|strict| !strict.is_none()) {
        None => Ok(false),
        Some(strict) => strict
            .cast::<PyBool>()
            .map(|strict| strict.is_true())
            .map_err(|_| field.refuse(holder, "one whose 'strict' is True or False")),
    }
}

impl Tools {
    pub fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let expected = "a list of tools, each a mapping with type 'function' and a 'function'; at least one";
        if !value.is_instance_of::<PyList>() && !value.is_instance_of::<PyTuple>() || value.len()? == 0 {
            return Err(field.refuse(value, expected));
        }
        let functions =
            field.items(value, MAX_TOOLS, "tools", expected, |_, tool| Function::read(field, tool))?;
        let mut names: Vec<_> = functions.iter().map(|function| &function.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(field.refuse(value, format!("tools of different names ({} comes twice)", pair[0])));
        }
        Ok(Self { functions, given: Json::read(field, value)? })
    }

    /// Whether one of them has this name.
    pub fn has(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }
}

impl Function {
    fn read(field: Field, tool: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let refuse = |value: &Bound<'_, PyAny>, limit: &str| Err(field.refuse(value, limit));
        let Some(function) = function_of(tool)? else {
            return refuse(tool, "a list of mappings with type 'function' and a 'function'");
        };
        let name = match function.get_item("name")? {
            Some(name) => field.text_within(&name, MAX_NAME_CHARS)?,
            None => return refuse(tool, "tools whose function has a name"),
        };
        let is_strict = is_strict(field, &function)?;
        let parameters = match function.get_item("parameters")?.filter(|parameters| !parameters.is_none()) {
            Some(parameters) if parameters.is_instance_of::<PyDict>() => {
                let schema = Json::read(field, &parameters)?.0;
                if is_strict || takes_nothing(&parameters)? { closed(&schema) } else { schema }
            }
            Some(other) => return refuse(&other, "tools whose parameters are a JSON schema"),
            None => NO_PARAMETERS.to_owned(),
        };
        Ok(Self { name, parameters })
    }
}

/// Whether a schema of parameters lists them, and there are none.
fn takes_nothing(parameters: &Bound<'_, PyAny>) -> PyResult<bool> {
    let properties = parameters.cast::<PyDict>()?.get_item("properties")?;
    Ok(properties
        .and_then(|properties| properties.cast_into::<PyDict>().ok())
        .is_some_and(|all| all.is_empty()))
}

/// The `function` of a mapping whose type is `function`.
fn function_of<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Ok(value) = value.cast::<PyDict>() else { return Ok(None) };
    let is_function = value.get_item("type")?.is_some_and(|kind| kind.eq("function").unwrap_or(false));
    let function = if is_function { value.get_item("function")? } else { None };
    Ok(function.and_then(|function| function.cast_into().ok()))
}

impl ToolChoice {
    pub fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let limit =
            "'none', 'auto', 'required', or a mapping as {'type': 'function', 'function': {'name': ...}}";
        let refuse = || field.refuse(value, limit);
        if let Ok(word) = value.cast::<PyString>() {
            return match word.to_str() {
                Ok("none") => Ok(Self::None),
                Ok("auto") => Ok(Self::Auto),
                Ok("required") => Ok(Self::Required),
                _ => Err(refuse()),
            };
        }
        let function = function_of(value)?.ok_or_else(refuse)?;
        let name = field.text_within(&function.get_item("name")?.ok_or_else(refuse)?, MAX_NAME_CHARS)?;
        Ok(Self::Function { name, given: Json::read(field, value)? })
    }
}

impl<'py> IntoPyObject<'py> for &ResponseFormat {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        self.given.into_pyobject(py)
    }
}

impl<'py> IntoPyObject<'py> for &Tools {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        self.given.into_pyobject(py)
    }
}

impl<'py> IntoPyObject<'py> for &ToolChoice {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        let word = match self {
            ToolChoice::None => "none",
            ToolChoice::Auto => "auto",
            ToolChoice::Required => "required",
            ToolChoice::Function { given, .. } => return given.into_pyobject(py),
        };
        Ok(PyString::new(py, word).into_any())
    }
}
