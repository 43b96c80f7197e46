//! Reads the option `quantization`: the name of a type or a mapping.

use penstock_types::{Auto, GROUP_SIZES, Named, Quantization, WeightScheme, WeightType};

use crate::field::{Field, Read, ReadError};
use crate::params::{check_keys, get};
use crate::value::{Kind, Value};

/// Maximum number of patterns.
const MAX_PATTERNS: usize = 1024;
/// Maximum length of a pattern in characters.
const MAX_PATTERN_CHARS: usize = 256;

/// The keys of a scheme.
const SCHEME_KEYS: [&str; 3] = ["type", "group_size", "symmetric"];
/// The keys of the option.
const KEYS: [&str; 6] = ["type", "group_size", "symmetric", "embedding", "head", "layers"];

pub fn read_quantization<V: Value>(field: Field, value: &V) -> Read<Quantization, V> {
    if value.kind() != Kind::Map {
        let default = read_type(field, value, " or a mapping")?.into();
        return Ok(Quantization { default, ..Quantization::default() });
    }
    check_keys(field, value, &KEYS)?;
    let optional = |key| get(value, key)?.map(|scheme| read_scheme(field, &scheme)).transpose();
    Ok(Quantization {
        default: read_options(field, value)?,
        embedding: optional("embedding")?,
        head: optional("head")?,
        layers: get(value, "layers")?
            .map_or_else(|| Ok(Vec::new()), |layers| read_layers(field, value, &layers))?,
    })
}

fn read_layers<V: Value>(field: Field, value: &V, layers: &V) -> Read<Vec<(String, WeightScheme)>, V> {
    if layers.kind() != Kind::Map {
        return Err(field.refuse(value, "a mapping with a mapping of patterns to types for 'layers'"));
    }
    if layers.map_len().map_err(ReadError::Raised)? > MAX_PATTERNS {
        return Err(
            field.refuse(value, format!("a mapping with at most {MAX_PATTERNS} patterns in 'layers'"))
        );
    }
    let entries = layers.entries().map_err(ReadError::Raised)?;
    let read = |(pattern, scheme): (V, V)| {
        Ok((field.text_within(&pattern, MAX_PATTERN_CHARS)?, read_scheme(field, &scheme)?))
    };
    entries.into_iter().map(read).collect()
}

/// The name of a type, or a mapping with the keys of a scheme.
fn read_scheme<V: Value>(field: Field, value: &V) -> Read<WeightScheme, V> {
    if value.kind() != Kind::Map {
        return Ok(read_type(field, value, " or a mapping of 'type', 'group_size' and 'symmetric'")?.into());
    }
    check_keys(field, value, &SCHEME_KEYS)?;
    read_options(field, value)
}

/// The keys of a scheme in a mapping.
fn read_options<V: Value>(field: Field, value: &V) -> Read<WeightScheme, V> {
    let weight_type = match get(value, "type")? {
        Some(name) => read_type(field, &name, "")?,
        None => return Err(field.refuse(value, "a mapping with a 'type'")),
    };
    let scheme = WeightScheme {
        weight_type,
        group_size: match get(value, "group_size")? {
            None => None,
            Some(size) => Some(read_group_size(field, value, &size)?),
        },
        symmetric: match get(value, "symmetric")?.map(|flag| flag.kind()) {
            None => None,
            Some(Kind::Bool(flag)) => Some(flag),
            Some(_) => return Err(field.refuse(value, "a mapping with True or False for 'symmetric'")),
        },
    };
    if weight_type.0 == Some(WeightType::Fp8) && scheme.symmetric == Some(false) {
        return Err(field.refuse(value, "a mapping with True for 'symmetric', because the type is 'fp8'"));
    }
    if scheme.grid().is_none() && (scheme.group_size.is_some() || scheme.symmetric.is_some()) {
        let name = weight_type.name();
        let limit = format!("a mapping without 'group_size' and 'symmetric', because the type is '{name}'");
        return Err(field.refuse(value, limit));
    }
    Ok(scheme)
}

fn read_type<V: Value>(field: Field, value: &V, others: &str) -> Read<Auto<WeightType>, V> {
    let name = if value.kind() == Kind::Text { value.text().map_err(ReadError::Raised)? } else { None };
    let is_of_gguf = name.is_some_and(|name| is_gguf_type(&name));
    field.choice(value).map_err(|error| match error {
        ReadError::Field(mut problem) => {
            problem.limit.push_str(others);
            if is_of_gguf {
                problem
                    .limit
                    .push_str("; a GGUF file keeps its own types: open one with weights of this type");
            }
            ReadError::Field(problem)
        }
        raised => raised,
    })
}

/// Whether a name is one of llama.cpp's types, such as `Q4_K_M` or `IQ3_XS`.
fn is_gguf_type(name: &str) -> bool {
    let name = name.strip_prefix(['I', 'i']).unwrap_or(name);
    name.strip_prefix(['Q', 'q']).is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

fn read_group_size<V: Value>(field: Field, map: &V, value: &V) -> Read<i16, V> {
    let number = value.integer().map_err(ReadError::Raised)?;
    let size = number.and_then(|number| i16::try_from(number).ok()).filter(|size| GROUP_SIZES.contains(size));
    size.ok_or_else(|| {
        let sizes: Vec<_> = GROUP_SIZES.iter().map(i16::to_string).collect();
        field.refuse(map, format!("a mapping with {} for 'group_size'", sizes.join(" or ")))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: serde_json::Value) -> Result<Quantization, String> {
        read_quantization(Field::new("quantization"), &value).map_err(|error| match error {
            ReadError::Field(problem) => problem.limit,
            ReadError::Raised(never) => match never {},
        })
    }

    #[test]
    fn mapping_with_every_key_is_read() {
        let int8 = WeightScheme::from(Auto(Some(WeightType::Int8)));
        let expected = Quantization {
            default: WeightScheme {
                group_size: Some(128),
                symmetric: Some(true),
                ..Auto(Some(WeightType::W4A16)).into()
            },
            embedding: Some(Auto(Some(WeightType::None)).into()),
            head: Some(WeightScheme { group_size: Some(-1), ..int8 }),
            layers: vec![("*.down_proj".to_owned(), int8)],
        };
        let value = json!({
            "type": "w4a16", "group_size": 128, "symmetric": true, "embedding": "none",
            "head": {"type": "int8", "group_size": -1}, "layers": {"*.down_proj": "int8"},
        });
        assert_eq!(read(value), Ok(expected));
        assert_eq!(read(json!("int8")), Ok(WeightType::Int8.into()));
        assert_eq!(read(json!("auto")), Ok(Quantization::default()));
    }

    #[test]
    fn invalid_key_or_value_error_names_it() {
        for (value, words) in [
            (json!("int3"), "'fp8' or a mapping"),
            (json!("Q4_K_M"), "a GGUF file keeps its own types"),
            (json!("iq3_xs"), "a GGUF file keeps its own types"),
            (json!({"group_size": 32}), "with a 'type'"),
            (json!({"type": "q4"}), "'int4'"),
            (json!({"type": "int4", "group_size": 48}), "with 32 or 64 or 128 or -1 for 'group_size'"),
            (json!({"type": "int4", "group_size": true}), "'group_size'"),
            (json!({"type": "int4", "symmetric": 1}), "with True or False for 'symmetric'"),
            (json!({"type": "none", "group_size": 32}), "because the type is 'none'"),
            (json!({"type": "fp8", "symmetric": false}), "because the type is 'fp8'"),
            (json!({"type": "int4", "bits": 4}), "without the key \"bits\""),
            (json!({"type": "int4", "layers": ["*"]}), "patterns to types for 'layers'"),
            (json!({"type": "int4", "layers": {"": "int8"}}), "a string of 1 to 256 characters"),
            (json!({"type": "int4", "layers": {"*": "int5"}}), "'int4'"),
            (json!({"type": "int4", "head": {"type": "int8", "layers": {}}}), "without the key \"layers\""),
        ] {
            let error = read(value.clone()).expect_err(words);
            assert!(error.contains(words), "{value}: {error}");
        }
    }
}
