//! JSON that a caller passes as values, stored as text: immutable, comparable, and a new value each time it is read.
//! The order of an object's members is kept, because it can matter (the order in which a schema's properties are
//! generated).

use std::fmt::Write;

use penstock_types::Json;

use crate::field::{Field, Read, ReadError};
use crate::value::{Kind, Value};

/// Maximum length of a text in bytes. Values that share parts can be far larger than the memory they take.
const MAX_BYTES: usize = 1 << 20;
/// Maximum nesting of arrays and objects.
const MAX_DEPTH: usize = 64;

/// The text of `value`, which is part of the value of `field`.
pub fn read_json<V: Value>(field: Field, value: &V) -> Read<Json, V> {
    let mut text = String::new();
    write(field, value, MAX_DEPTH, &mut text)?;
    Ok(Json(text))
}

/// Appends the text of `value`, which may have `depth` more levels.
fn write<V: Value>(field: Field, value: &V, depth: usize, text: &mut String) -> Read<(), V> {
    match value.kind() {
        Kind::Text => {
            if value.text_len().map_err(ReadError::Raised)? > MAX_BYTES {
                return Err(too_large(field, value));
            }
            write_string(&field.text(value)?, text);
        }
        Kind::Map => write_object(field, value, deeper(field, value, depth)?, text)?,
        Kind::Array => {
            let depth = deeper(field, value, depth)?;
            text.push('[');
            for (index, item) in value.array().enumerate() {
                text.push_str(if index == 0 { "" } else { "," });
                write(field, &item, depth, text)?;
            }
            text.push(']');
        }
        _ => write_scalar(field, value, text)?,
    }
    if text.len() > MAX_BYTES { Err(too_large(field, value)) } else { Ok(()) }
}

fn write_object<V: Value>(field: Field, value: &V, depth: usize, text: &mut String) -> Read<(), V> {
    text.push('{');
    if value.map_len().map_err(ReadError::Raised)? > MAX_BYTES {
        return Err(too_large(field, value));
    }
    for (index, (name, member)) in value.entries().map_err(ReadError::Raised)?.into_iter().enumerate() {
        text.push_str(if index == 0 { "" } else { "," });
        if name.kind() != Kind::Text {
            return Err(field.refuse(&name, "JSON, in which names are strings"));
        }
        write(field, &name, depth, text)?;
        text.push(':');
        write(field, &member, depth, text)?;
    }
    text.push('}');
    Ok(())
}

fn write_scalar<V: Value>(field: Field, value: &V, text: &mut String) -> Read<(), V> {
    let written = match value.kind() {
        Kind::Null => write!(text, "null"),
        Kind::Bool(flag) => write!(text, "{flag}"),
        Kind::Integer(number) => write!(text, "{number}"),
        // The shortest text that reads as the same number, and not as an integer.
        Kind::Float(number) if number.is_finite() => write!(text, "{number:?}"),
        _ => {
            let limit =
                "JSON: dicts, lists, strings, finite numbers, integers of 128 bits, True, False and None";
            return Err(field.refuse(value, limit));
        }
    };
    written.expect("a string accepts any text; this is a bug");
    Ok(())
}

/// Appends a string in quotes.
fn write_string(string: &str, text: &mut String) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            '\0'..='\x1f' => {
                write!(text, "\\u{:04x}", u32::from(character))
                    .expect("a string accepts any text; this is a bug");
            }
            _ => text.push(character),
        }
    }
    text.push('"');
}

fn deeper<V: Value>(field: Field, value: &V, depth: usize) -> Read<usize, V> {
    depth
        .checked_sub(1)
        .ok_or_else(|| field.refuse(value, format!("JSON of at most {MAX_DEPTH} nested arrays and objects")))
}

fn too_large<V: Value>(field: Field, value: &V) -> ReadError<V> {
    field.refuse(value, format!("JSON of at most {MAX_BYTES} bytes"))
}
