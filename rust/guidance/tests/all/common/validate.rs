//! A simple JSON-schema validator for the keywords in the test schemas, written from the specification.

use regex_automata::meta::Regex;
use serde_json::{Map, Value};

/// Validates a value; the error describes the first violation.
pub fn validate(value: &Value, schema: &Value) -> Result<(), String> {
    check(value, schema, schema)
}

/// Matches as in ECMA 262, where U+FEFF is whitespace.
pub fn is_match(pattern: &str, text: &str) -> bool {
    Regex::new(&pattern.replace(r"\s", r"[\s\u{feff}]")).unwrap().is_match(text)
}

fn check(value: &Value, schema: &Value, root: &Value) -> Result<(), String> {
    let keywords = match schema {
        Value::Bool(true) => return Ok(()),
        Value::Object(keywords) => keywords,
        _ => return Err(format!("{value} under the schema {schema}")),
    };
    for (keyword, argument) in keywords {
        if !holds(keyword, argument, value, keywords, root)? {
            return Err(format!("{keyword} {argument} does not hold for {value}"));
        }
    }
    Ok(())
}

fn holds(
    keyword: &str,
    argument: &Value,
    value: &Value,
    keywords: &Map<String, Value>,
    root: &Value,
) -> Result<bool, String> {
    let valid = |schema: &Value| check(value, schema, root).is_ok();
    let schemas = || argument.as_array().unwrap().iter();
    Ok(match keyword {
        "type" => match argument {
            Value::Array(types) => types.iter().any(|name| is_type(value, name.as_str().unwrap())),
            name => is_type(value, name.as_str().unwrap()),
        },
        "enum" => schemas().any(|constant| equal(constant, value)),
        "const" => equal(argument, value),
        "anyOf" => schemas().any(valid),
        "oneOf" => schemas().filter(|schema| valid(schema)).count() == 1,
        "allOf" => schemas().all(valid),
        "$ref" => valid(root.pointer(argument.as_str().unwrap().trim_start_matches('#')).unwrap()),
        _ => match value {
            Value::String(text) => text_holds(keyword, argument, text),
            Value::Number(number) => number_holds(keyword, argument, number.as_f64().unwrap()),
            Value::Array(items) => return items_hold(keyword, argument, items, keywords, root),
            Value::Object(entries) => return entries_hold(keyword, argument, entries, keywords, root),
            _ => true,
        },
    })
}

fn is_type(value: &Value, name: &str) -> bool {
    match name {
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => panic!("unknown type {name}"),
    }
}

fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => left.as_f64() == right.as_f64(),
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(left, right)| equal(left, right))
        }
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && left.iter().all(|(name, left)| right.get(name).is_some_and(|right| equal(left, right)))
        }
        _ => left == right,
    }
}

fn text_holds(keyword: &str, argument: &Value, text: &str) -> bool {
    let length = text.chars().count() as u64;
    match keyword {
        "minLength" => length >= argument.as_u64().unwrap(),
        "maxLength" => length <= argument.as_u64().unwrap(),
        "pattern" => is_match(argument.as_str().unwrap(), text),
        "format" => is_format(argument.as_str().unwrap(), text),
        _ => true,
    }
}

fn is_format(name: &str, text: &str) -> bool {
    let date = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])";
    let time = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)";
    let pattern = match name {
        "ipv4" => return text.parse::<std::net::Ipv4Addr>().is_ok(),
        "ipv6" => return text.parse::<std::net::Ipv6Addr>().is_ok(),
        "date" => date.to_owned(),
        "time" => time.to_owned(),
        "date-time" => format!("{date}[tT]{time}"),
        "uuid" => "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_owned(),
        "email" => "[^@ ]+@[^@ ]+".to_owned(),
        "hostname" => r"[a-zA-Z0-9.-]+".to_owned(),
        "uri" => r"[a-zA-Z][a-zA-Z0-9+.-]*:[^ ]*".to_owned(),
        "duration" => r"P[0-9YMWDTHS]+".to_owned(),
        _ => panic!("unknown format {name}"),
    };
    is_match(&format!("^(?:{pattern})$"), text)
}

fn number_holds(keyword: &str, argument: &Value, number: f64) -> bool {
    let bound = || argument.as_f64().unwrap();
    match keyword {
        "minimum" => number >= bound(),
        "maximum" => number <= bound(),
        "exclusiveMinimum" => number > bound(),
        "exclusiveMaximum" => number < bound(),
        // Beyond 2^53 the parsed number may differ from the written one.
        "multipleOf" => number.abs() >= 9e15 || (number / bound()).fract() == 0.0,
        _ => true,
    }
}

fn items_hold(
    keyword: &str,
    argument: &Value,
    items: &[Value],
    keywords: &Map<String, Value>,
    root: &Value,
) -> Result<bool, String> {
    let prefix = |name: &str| keywords.get(name).and_then(Value::as_array).map_or(0, Vec::len);
    let each = |items: &[Value], schemas: &[Value]| {
        items.iter().zip(schemas).try_for_each(|(item, schema)| check(item, schema, root))
    };
    let rest = |from: usize| items.iter().skip(from).try_for_each(|item| check(item, argument, root));
    match (keyword, argument) {
        ("minItems", _) => return Ok(items.len() as u64 >= argument.as_u64().unwrap()),
        ("maxItems", _) => return Ok(items.len() as u64 <= argument.as_u64().unwrap()),
        ("prefixItems" | "items", Value::Array(schemas)) => each(items, schemas)?,
        ("items", _) => rest(prefix("prefixItems"))?,
        ("additionalItems", _) => rest(prefix("items"))?,
        _ => {}
    }
    Ok(true)
}

fn entries_hold(
    keyword: &str,
    argument: &Value,
    entries: &Map<String, Value>,
    keywords: &Map<String, Value>,
    root: &Value,
) -> Result<bool, String> {
    let named =
        |name: &str| keywords.get("properties").is_some_and(|properties| properties.get(name).is_some());
    let patterns = keywords.get("patternProperties").and_then(Value::as_object);
    let patterned =
        |name: &str| patterns.is_some_and(|all| all.keys().any(|pattern| is_match(pattern, name)));
    match keyword {
        "minProperties" => return Ok(entries.len() as u64 >= argument.as_u64().unwrap()),
        "maxProperties" => return Ok(entries.len() as u64 <= argument.as_u64().unwrap()),
        "required" => {
            return Ok(argument
                .as_array()
                .unwrap()
                .iter()
                .all(|name| entries.contains_key(name.as_str().unwrap())));
        }
        "properties" => {
            for (name, schema) in argument.as_object().unwrap() {
                entries.get(name).map_or(Ok(()), |value| check(value, schema, root))?;
            }
        }
        "patternProperties" => {
            for (pattern, schema) in argument.as_object().unwrap() {
                let matching = entries.iter().filter(|(name, _)| is_match(pattern, name));
                matching.into_iter().try_for_each(|(_, value)| check(value, schema, root))?;
            }
        }
        "additionalProperties" => {
            let others = entries.iter().filter(|(name, _)| !named(name) && !patterned(name));
            others.into_iter().try_for_each(|(_, value)| check(value, argument, root))?;
        }
        _ => {}
    }
    Ok(true)
}
