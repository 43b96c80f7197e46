//! JSON files of limited size, and typed access to their objects.
//!
//! The limits are far above the size of real files and bound the memory that parsing allocates. The parser limits
//! nesting.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{CheckpointError, TRUNCATED, shown};
use crate::lfs::check_lfs_pointer;

pub(crate) const CONFIG_LIMIT: u64 = 4 << 20;

/// The contents of a file, or `None` if it does not exist. Only regular files up to `limit` bytes are accepted.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
    let io = |source| CheckpointError::io(path, source);
    let metadata = match path.metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    if !metadata.is_file() {
        return Err(CheckpointError::not_a_model(path, "is not a regular file"));
    }
    let mut bytes = Vec::new();
    // The reader reports it if there is no memory.
    let _ = bytes.try_reserve_exact(metadata.len().min(limit) as usize);
    File::open(path).map_err(io)?.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(CheckpointError::malformed(
            path,
            "size",
            format!("{} bytes; the limit is {limit}", metadata.len()),
        ));
    }
    check_lfs_pointer(path, &bytes)?;
    Ok(Some(bytes))
}

/// The text of a file, or `None` if it does not exist.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<Option<String>, CheckpointError> {
    let Some(bytes) = read(path, limit)? else { return Ok(None) };
    let text = String::from_utf8(bytes)
        .map_err(|error| CheckpointError::malformed(path, "text", error.to_string()))?;
    Ok(Some(text))
}

/// The JSON object in a file, or `None` if it does not exist.
pub(crate) fn read_object(path: &Path) -> Result<Option<JsonObject>, CheckpointError> {
    let Some(bytes) = read(path, CONFIG_LIMIT)? else { return Ok(None) };
    Ok(Some(JsonObject { path: path.to_owned(), fields: parse_object(path, &bytes)? }))
}

/// Numbers that Python's `json` writes and reads, and that are not JSON.
const CONSTANTS: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];

/// Parses a JSON object. [`CONSTANTS`] become strings, so that they are refused only in fields that are read.
pub(crate) fn parse_object<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, CheckpointError> {
    let parsed = serde_json::from_slice(bytes).or_else(|error| match quote_constants(bytes) {
        Some(quoted) => serde_json::from_slice(&quoted),
        None => Err(error),
    });
    parsed.map_err(|error| parse_error(path, "JSON object", &error))
}

/// The text with [`CONSTANTS`] in quotation marks; `None` if it has none outside of strings.
fn quote_constants(bytes: &[u8]) -> Option<Vec<u8>> {
    let (mut quoted, mut copied) = (Vec::new(), 0);
    let (mut at, mut in_string) = (0, false);
    while let Some(byte) = bytes.get(at) {
        let constant = match byte {
            b'"' => {
                in_string = !in_string;
                None
            }
            b'\\' if in_string => {
                at += 1;
                None
            }
            _ if in_string => None,
            _ => CONSTANTS.into_iter().find(|constant| bytes[at..].starts_with(constant)),
        };
        match constant {
            None => at += 1,
            Some(constant) => {
                quoted.extend_from_slice(&bytes[copied..at]);
                quoted.extend([b"\"", constant, b"\""].concat());
                at += constant.len();
                copied = at;
            }
        }
    }
    if copied == 0 {
        return None;
    }
    quoted.extend_from_slice(&bytes[copied..]);
    Some(quoted)
}

/// The error of a file that is not valid JSON.
pub(crate) fn parse_error(path: &Path, field: &str, error: &serde_json::Error) -> CheckpointError {
    let mut problem = shown(&error.to_string());
    if error.is_eof() {
        problem = format!("{problem}; {TRUNCATED}");
    }
    CheckpointError::malformed(path, field, problem)
}

/// An object and the path of its file. A missing or `null` field is `None`; a field of another type is an error.
#[derive(Debug)]
pub(crate) struct JsonObject {
    pub(crate) path: PathBuf,
    pub(crate) fields: Map<String, Value>,
}

impl JsonObject {
    /// The object of a file that does not exist.
    pub(crate) fn empty(path: PathBuf) -> Self {
        Self { path, fields: Map::new() }
    }

    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn bool(&self, field: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(crate) fn u32(&self, field: &str) -> Result<Option<u32>, CheckpointError> {
        self.typed(field, "a non-negative integer of 32 bits", |value| value.as_u64()?.try_into().ok())
    }

    pub(crate) fn f32(&self, field: &str) -> Result<Option<f32>, CheckpointError> {
        self.typed(field, "a number within the range of 32 bits", |value| {
            Some(value.as_f64()? as f32).filter(|number| number.is_finite())
        })
    }

    /// One token id or a list of them. Negative ids are ignored: some files use them for "none".
    pub(crate) fn token_ids(&self, field: &str) -> Result<Option<Vec<u32>>, CheckpointError> {
        self.typed(field, "a token id or a list of token ids", |value| {
            let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            let ids = ids.iter().map(Value::as_i64).collect::<Option<Vec<_>>>()?;
            ids.into_iter().filter(|&id| id >= 0).map(|id| id.try_into().ok()).collect()
        })
    }

    pub(crate) fn typed<'a, T>(
        &'a self,
        field: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let found = match value {
                Value::Array(_) => "a list".to_owned(),
                Value::Object(_) => "an object".to_owned(),
                value => shown(&value.to_string()),
            };
            CheckpointError::malformed(&self.path, field, format!("{found}; {expected} is expected"))
        })
    }
}

/// Whether a name from an index stays inside the directory. Symbolic links may lead anywhere, because they were created
/// by the owner of the directory.
pub(crate) fn is_inside(name: &str) -> bool {
    let mut components = Path::new(name).components().peekable();
    components.peek().is_some() && components.all(|component| matches!(component, Component::Normal(_)))
}
