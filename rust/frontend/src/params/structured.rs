//! `response_format`, `tools` and `tool_choice`, in the format of OpenAI's API. The caller gets back the JSON that was
//! passed.

use penstock_types::Json;

use super::close_schema::{Closing, close_schema};
use super::json::read_json;
use crate::field::{Field, Read, ReadError};
use crate::value::{Kind, Value};

/// Maximum length of a tool's name in characters.
const MAX_NAME_CHARS: usize = 128;
/// The schema of the arguments of a tool without `parameters`.
const NO_PARAMETERS: &str = r#"{"type":"object","properties":{},"additionalProperties":false}"#;

/// The value of `response_format`.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseFormat {
    pub kind: ResponseKind,
    pub json: Json,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ResponseKind {
    /// Any text.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid under this schema.
    JsonSchema { schema: Json, ignores_unsupported: bool },
}

/// The value of `tools`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    pub functions: Vec<Function>,
    pub json: Json,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    pub name: String,
    /// The JSON schema of the arguments.
    pub parameters: String,
    pub ignores_unsupported: bool,
}

/// The value of `tool_choice`.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolChoice {
    /// No tool is called.
    None,
    /// The model decides.
    Auto,
    /// At least one tool is called.
    Required,
    /// This tool is called.
    Function { name: String, json: Json },
}

impl ResponseFormat {
    pub fn read<V: Value>(field: Field, value: &V) -> Read<Self, V> {
        let refuse = || {
            let limit = "a mapping whose type is 'text', 'json_object' or 'json_schema', or a JSON schema";
            field.refuse(value, limit)
        };
        if value.kind() != Kind::Map {
            return Err(refuse());
        }
        let kind = match word(&get(value, "type")?)?.as_deref() {
            Some("text") => ResponseKind::Text,
            Some("json_object") if get(value, "schema")?.is_some() => {
                let limit = "the schema itself, or {'type': 'json_schema', 'json_schema': {'schema': ...}}";
                return Err(field.refuse(value, limit));
            }
            Some("json_object") => ResponseKind::JsonObject,
            Some("json_schema") => read_schema(field, value)?,
            _ if is_schema(value)? => {
                let json = read_json(field, value)?;
                let schema = Json(close_schema(&json.0, Closing::Default));
                let kind = ResponseKind::JsonSchema { schema, ignores_unsupported: false };
                return Ok(Self { kind, json });
            }
            _ => return Err(refuse()),
        };
        let is_schema = matches!(kind, ResponseKind::JsonSchema { .. });
        check_keys(field, value, if is_schema { &["type", "json_schema"] } else { &["type"] })?;
        Ok(Self { kind, json: read_json(field, value)? })
    }

    /// Whether it constrains the output.
    pub fn is_constraint(&self) -> bool {
        self.kind != ResponseKind::Text
    }
}

pub(crate) fn get<V: Value>(map: &V, key: &str) -> Read<Option<V>, V> {
    map.get(key).map_err(ReadError::Raised)
}

/// A value that is a short string.
fn word<V: Value>(value: &Option<V>) -> Read<Option<String>, V> {
    let is_word = |value: &&V| value.kind() == Kind::Text && matches!(value.text_len(), Ok(0..=64));
    let text = value.as_ref().filter(is_word).map(Value::text).transpose().map_err(ReadError::Raised)?;
    Ok(text.flatten())
}

/// The most keys of a map whose keys are checked one by one; more are refused before any is read.
const MAX_KEYS: usize = 64;

/// Refuses keys that are not known: they would have no effect.
pub(crate) fn check_keys<V: Value>(field: Field, map: &V, known: &[&str]) -> Read<(), V> {
    if map.map_len().map_err(ReadError::Raised)? > MAX_KEYS {
        return Err(field.refuse(map, format!("a mapping of at most {MAX_KEYS} keys")));
    }
    for (key, _) in map.entries().map_err(ReadError::Raised)? {
        let text = word(&Some(key.clone()))?;
        if !text.is_some_and(|text| known.contains(&text.as_str())) {
            let known: Vec<_> = known.iter().map(|key| format!("'{key}'")).collect();
            let limit =
                format!("a mapping without the key {}; the known keys are {}", key.quote(), known.join(", "));
            return Err(field.refuse(map, limit));
        }
    }
    Ok(())
}

/// Whether a mapping is a JSON schema: its `type` is one of a schema's, or it has another keyword that constrains
/// values.
fn is_schema<V: Value>(value: &V) -> Read<bool, V> {
    let is_type = |name: V| {
        word(&Some(name)).map(|name| name.is_some_and(|name| SCHEMA_TYPES.contains(&name.as_str())))
    };
    match get(value, "type")? {
        Some(types) if types.kind() == Kind::Array => {
            types.array().take(SCHEMA_TYPES.len() + 1).map(is_type).try_fold(true, |all, one| Ok(all && one?))
        }
        Some(name) => is_type(name),
        None => {
            let constrains = |key: &&str| get(value, key).map(|value| value.is_some());
            CONSTRAINTS.iter().map(constrains).find(|found| !matches!(found, Ok(false))).unwrap_or(Ok(false))
        }
    }
}

/// The types of a JSON schema.
const SCHEMA_TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];
/// The keywords that a JSON schema without a type has at least one of; those that are not supported are refused by
/// name.
const CONSTRAINTS: [&str; 41] = [
    "$dynamicRef",
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Reads the schema, which is the value of `schema` in `json_schema`, or `json_schema` itself.
fn read_schema<V: Value>(field: Field, format: &V) -> Read<ResponseKind, V> {
    let limit = "a mapping with a schema in 'json_schema', as its value or as its 'schema'";
    let refuse = || field.refuse(format, limit);
    let holder =
        get(format, "json_schema")?.filter(|holder| holder.kind() == Kind::Map).ok_or_else(refuse)?;
    let (schema, closing, ignores_unsupported) = match get(&holder, "schema")? {
        Some(schema) => {
            check_keys(field, &holder, &["name", "description", "schema", "strict", "ignore_unsupported"])?;
            let ignores = flag(field, &holder, "ignore_unsupported")?.unwrap_or(false);
            (schema, closing(field, &holder)?, ignores)
        }
        None if get(&holder, "name")?.is_some() && get(&holder, "type")?.is_none() => return Err(refuse()),
        None => (holder, Closing::Default, false),
    };
    if schema.kind() != Kind::Map {
        return Err(refuse());
    }
    let schema = Json(close_schema(&read_json(field, &schema)?.0, closing));
    Ok(ResponseKind::JsonSchema { schema, ignores_unsupported })
}

/// The meaning of the `strict` beside a schema.
fn closing<V: Value>(field: Field, holder: &V) -> Read<Closing, V> {
    Ok(match flag(field, holder, "strict")? {
        None => Closing::Default,
        Some(true) => Closing::Strict,
        Some(false) => Closing::Open,
    })
}

/// An optional boolean of a mapping.
fn flag<V: Value>(field: Field, holder: &V, key: &str) -> Read<Option<bool>, V> {
    match get(holder, key)?.map(|value| value.kind()) {
        None | Some(Kind::Null) => Ok(None),
        Some(Kind::Bool(flag)) => Ok(Some(flag)),
        Some(_) => Err(field.refuse(holder, format!("a mapping whose '{key}' is True or False"))),
    }
}

impl Tools {
    pub fn read<V: Value>(field: Field, value: &V, max_items: usize) -> Read<Self, V> {
        let expected = "a list of tools, each a mapping with type 'function' and a 'function'; at least one";
        if value.kind() != Kind::Array || value.array().next().is_none() {
            return Err(field.refuse(value, expected));
        }
        let functions =
            field.items(value, max_items, "tools", expected, |_, tool| Function::read(field, tool))?;
        let mut names: Vec<_> = functions.iter().map(|function| &function.name).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(field.refuse(value, format!("tools with different names ({} occurs twice)", pair[0])));
        }
        Ok(Self { functions, json: read_json(field, value)? })
    }

    /// Whether a tool has this name.
    pub fn has(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }
}

impl Function {
    fn read<V: Value>(field: Field, tool: &V) -> Read<Self, V> {
        let Some(function) = function_of(tool)? else {
            return Err(field.refuse(tool, "a list of mappings with type 'function' and a 'function'"));
        };
        if get(tool, "ignore_unsupported")?.is_some() {
            return Err(field.refuse(tool, "tools with 'ignore_unsupported' in the function, if at all"));
        }
        let name = match get(&function, "name")? {
            Some(name) => field.text_within(&name, MAX_NAME_CHARS)?,
            None => return Err(field.refuse(tool, "tools whose function has a name")),
        };
        let closing = closing(field, &function)?;
        let parameters = match get(&function, "parameters")? {
            Some(parameters) if parameters.kind() == Kind::Map => {
                close_schema(&read_json(field, &parameters)?.0, closing)
            }
            Some(other) if other.kind() != Kind::Null => {
                return Err(field.refuse(&other, "tools whose parameters are a JSON schema"));
            }
            _ => NO_PARAMETERS.to_owned(),
        };
        let ignores_unsupported = flag(field, &function, "ignore_unsupported")?.unwrap_or(false);
        Ok(Self { name, parameters, ignores_unsupported })
    }
}

/// The `function` of a mapping whose type is `function`.
fn function_of<V: Value>(value: &V) -> Read<Option<V>, V> {
    if value.kind() != Kind::Map || word(&get(value, "type")?)?.as_deref() != Some("function") {
        return Ok(None);
    }
    Ok(get(value, "function")?.filter(|function| function.kind() == Kind::Map))
}

impl ToolChoice {
    pub fn read<V: Value>(field: Field, value: &V) -> Read<Self, V> {
        let limit =
            "'none', 'auto', 'required', or a mapping as {'type': 'function', 'function': {'name': ...}}";
        let refuse = || field.refuse(value, limit);
        if value.kind() == Kind::Text {
            return match word(&Some(value.clone()))?.as_deref() {
                Some("none") => Ok(Self::None),
                Some("auto") => Ok(Self::Auto),
                Some("required") => Ok(Self::Required),
                _ => Err(refuse()),
            };
        }
        let function = function_of(value)?.ok_or_else(refuse)?;
        let name = field.text_within(&get(&function, "name")?.ok_or_else(refuse)?, MAX_NAME_CHARS)?;
        Ok(Self::Function { name, json: read_json(field, value)? })
    }

    /// Whether the output has to call a tool.
    pub fn requires_call(&self) -> bool {
        matches!(self, Self::Required | Self::Function { .. })
    }
}
