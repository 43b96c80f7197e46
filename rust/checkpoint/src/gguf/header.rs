//! The header of a GGUF file: metadata, then the table of tensors. Bytes in, checked borrows out.
//!
//! The file says how many of everything there are; nothing is allocated on its word. Every entry consumes bytes that
//! really exist, so what is built is bounded by the length of the file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::metadata::{Metadata, Value};
use crate::error::{CheckpointError, shown};
use crate::storage::Storage;

const MAX_DIMENSIONS: u32 = 4;
const MAX_KEY: usize = 65_535;
const DEFAULT_ALIGNMENT: u64 = 32;

/// What the header says, borrowed from the file.
pub(super) struct Header<'a> {
    pub(super) version: u32,
    pub(super) metadata: Metadata<'a>,
    pub(super) tensors: BTreeMap<&'a str, TensorInfo>,
}

/// One tensor of the table: its range lies in the file, is aligned, and overlaps no other.
pub(super) struct TensorInfo {
    /// Slowest dimension first.
    pub(super) shape: Vec<usize>,
    pub(super) storage: Storage,
    /// Bytes of the file.
    pub(super) range: Range<usize>,
}

impl<'a> Header<'a> {
    pub(super) fn parse(file: &'a Path, bytes: &'a [u8]) -> Result<Self, CheckpointError> {
        let mut cursor = Cursor { file, bytes, at: 0 };
        if cursor.take(4, "magic")? != b"GGUF" {
            return Err(CheckpointError::not_a_model(file, "is no GGUF file: it does not begin with GGUF"));
        }
        let version = cursor.u32("version")?;
        if !matches!(version, 2 | 3) {
            let found = if matches!(version.swap_bytes(), 2 | 3) {
                "big-endian".to_owned()
            } else {
                version.to_string()
            };
            return Err(CheckpointError::unsupported(file, "version", found, "2 and 3, little-endian"));
        }
        let num_tensors = cursor.u64("tensor count")?;
        let num_fields = cursor.u64("metadata count")?;

        let mut metadata = Metadata::new(file);
        for _ in 0..num_fields {
            let key = cursor.key("metadata key")?;
            let value = cursor.value(key)?;
            metadata.insert(key, value)?;
        }
        let alignment = metadata.integer("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            let problem = format!("{alignment}; a power of two up to {} is expected", 1 << 20);
            return Err(cursor.malformed("general.alignment", problem));
        }

        let mut declared = Vec::new();
        for _ in 0..num_tensors {
            declared.push(cursor.tensor()?);
        }
        let data_start = (cursor.at as u64).next_multiple_of(alignment);
        let tensors = place(&cursor, declared, data_start, alignment)?;
        Ok(Header { version, metadata, tensors })
    }
}

/// A tensor as declared; the offset counts from the beginning of the data and is not yet checked.
struct Declared<'a> {
    name: &'a str,
    shape: Vec<usize>,
    storage: Storage,
    bytes: usize,
    offset: u64,
}

/// Checks where the tensors lie: aligned, inside the file, apart from each other, each name once.
fn place<'a>(
    cursor: &Cursor<'a>,
    declared: Vec<Declared<'a>>,
    data_start: u64,
    alignment: u64,
) -> Result<BTreeMap<&'a str, TensorInfo>, CheckpointError> {
    let file_len = cursor.bytes.len() as u64;
    let mut tensors = BTreeMap::new();
    for tensor in declared {
        let malformed = |problem: String| cursor.malformed(format!("tensor {}", shown(tensor.name)), problem);
        let offset = tensor.offset;
        if !offset.is_multiple_of(alignment) {
            return Err(malformed(format!("offset {offset} is no multiple of the alignment {alignment}")));
        }
        let start = data_start.checked_add(offset);
        let range = start.and_then(|start| Some((start, start.checked_add(tensor.bytes as u64)?)));
        let Some((start, end)) = range.filter(|&(_, end)| end <= file_len) else {
            let bytes = tensor.bytes;
            let problem = format!("{bytes} bytes at {data_start} + {offset}; the file has {file_len}");
            return Err(malformed(problem));
        };
        let info =
            TensorInfo { shape: tensor.shape, storage: tensor.storage, range: start as usize..end as usize };
        if tensors.insert(tensor.name, info).is_some() {
            return Err(malformed("there are two of this name".to_owned()));
        }
    }

    let mut by_offset: Vec<_> = tensors.iter().map(|(name, info)| (&info.range, *name)).collect();
    by_offset.sort_by_key(|(range, _)| range.start);
    for pair in by_offset.windows(2) {
        let ((before, name), (after, other)) = (&pair[0], &pair[1]);
        if after.start < before.end {
            let problem = format!("bytes {before:?} overlap {after:?} of {}", shown(other));
            return Err(cursor.malformed(format!("tensor {}", shown(name)), problem));
        }
    }
    Ok(tensors)
}

/// Reads forward through the header. Every step checks that its bytes are there.
pub(super) struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn malformed(&self, field: impl Into<String>, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::malformed(self.file, field, problem)
    }

    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], CheckpointError> {
        let rest = &self.bytes[self.at..];
        let Some(taken) = usize::try_from(count).ok().and_then(|count| rest.get(..count)) else {
            let problem =
                format!("needs {count} bytes at byte {}; the file has {}", self.at, self.bytes.len());
            return Err(self.malformed(shown(what), problem));
        };
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], CheckpointError> {
        let taken = self.take(N as u64, what)?;
        Ok(taken.try_into().expect("take gives as many bytes as asked; this is a bug"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string_bytes(&mut self, what: &str) -> Result<&'a [u8], CheckpointError> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    fn string(&mut self, what: &str) -> Result<&'a str, CheckpointError> {
        let bytes = self.string_bytes(what)?;
        std::str::from_utf8(bytes).map_err(|error| self.malformed(shown(what), error.to_string()))
    }

    /// A string that names something.
    fn key(&mut self, what: &str) -> Result<&'a str, CheckpointError> {
        let key = self.string(what)?;
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(
                self.malformed(what, format!("{} bytes long; 1 to {MAX_KEY} are expected", key.len()))
            );
        }
        Ok(key)
    }

    fn value(&mut self, key: &str) -> Result<Value<'a>, CheckpointError> {
        let kind = self.u32(key)?;
        Ok(match kind {
            8 => Value::Text(self.string(key)?),
            9 => self.array_value(key)?,
            kind => {
                let Some(size) = scalar_bytes(kind) else {
                    return Err(self.malformed(shown(key), format!("unknown value type {kind}")));
                };
                let bytes = self.take(size, key)?;
                Value::scalar(kind, bytes)
                    .ok_or_else(|| self.malformed(shown(key), "is neither true nor false"))?
            }
        })
    }

    /// An array is kept as the bytes it lies in; only its length is checked here. No known key nests arrays, so nesting
    /// is refused, and with it every recursion.
    fn array_value(&mut self, key: &str) -> Result<Value<'a>, CheckpointError> {
        let kind = self.u32(key)?;
        let count = self.u64(key)?;
        let start = self.at;
        if kind == 8 {
            for _ in 0..count {
                self.string_bytes(key)?;
            }
        } else {
            let Some(size) = scalar_bytes(kind) else {
                return Err(self.malformed(
                    shown(key),
                    format!("an array of value type {kind}; scalars and text are expected"),
                ));
            };
            let Some(bytes) = count.checked_mul(size) else {
                return Err(self.malformed(shown(key), format!("an array of {count} values of {size} bytes")));
            };
            self.take(bytes, key)?;
        }
        // Each element took at least one byte, so the count fits.
        Ok(Value::Array { kind, count: count as usize, bytes: &self.bytes[start..self.at] })
    }

    fn tensor(&mut self) -> Result<Declared<'a>, CheckpointError> {
        let name = self.key("tensor name")?;
        let malformed = |problem: String| {
            CheckpointError::malformed(self.file, format!("tensor {}", shown(name)), problem)
        };
        let dimensions = self.u32(name)?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            return Err(malformed(format!("{dimensions} dimensions; 1 to {MAX_DIMENSIONS} are expected")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.u64(name)?);
        }
        let kind = self.u32(name)?;
        let offset = self.u64(name)?;

        let Some(storage) = storage(kind) else {
            let field = format!("tensor {}", shown(name));
            return Err(CheckpointError::unsupported(self.file, field, type_name(kind), Storage::SUPPORTED));
        };
        let columns = shape[0];
        if !columns.is_multiple_of(storage.block_elements() as u64) {
            let block = storage.block_elements();
            return Err(malformed(format!(
                "rows of {columns} elements; {storage} comes in blocks of {block}"
            )));
        }
        let elements =
            shape.iter().try_fold(1, |size: usize, &dimension| size.checked_mul(dimension.try_into().ok()?));
        let bytes = elements.filter(|&elements| elements > 0).and_then(|elements| storage.bytes_of(elements));
        let Some(bytes) = bytes else {
            return Err(malformed(format!("shape {shape:?} of {storage} is no possible size")));
        };
        let shape = shape.into_iter().rev().map(|dimension| dimension as usize).collect();
        Ok(Declared { name, shape, storage, bytes, offset })
    }
}

/// Bytes of a scalar of this GGUF value type.
pub(super) fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn storage(ggml_type: u32) -> Option<Storage> {
    Some(match ggml_type {
        0 => Storage::F32,
        1 => Storage::F16,
        2 => Storage::Q4_0,
        3 => Storage::Q4_1,
        8 => Storage::Q8_0,
        12 => Storage::Q4K,
        13 => Storage::Q5K,
        14 => Storage::Q6K,
        30 => Storage::Bf16,
        _ => return None,
    })
}

/// How ggml calls a type that is not supported, for messages.
fn type_name(ggml_type: u32) -> String {
    let name = match ggml_type {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        other => return format!("of ggml type {other}"),
    };
    name.to_owned()
}
