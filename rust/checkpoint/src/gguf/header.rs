//! Parser of GGUF headers: metadata, then the table of tensors.
//!
//! Memory is never allocated by a count in the file. Every entry consumes existing bytes of the header, of which the
//! number is limited, because texts take several times their bytes in the file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::metadata::Metadata;
use super::value::{MetadataValue, scalar_bytes};
use crate::error::{CheckpointError, TRUNCATED, shown};
use crate::storage::Storage;

/// Maximum size of the header: ten times that of the largest published ones.
const MAX_HEADER: usize = 256 << 20;
/// Maximum number of strings in an array, which is also that of token ids.
const MAX_STRINGS: u64 = 1 << 22;
const MAX_DIMENSIONS: u32 = 4;
const MAX_KEY: usize = 65_535;
const DEFAULT_ALIGNMENT: u64 = 32;

/// The checked header, borrowed from the file.
pub(super) struct GgufHeader<'a> {
    pub(super) version: u32,
    pub(super) metadata: Metadata<'a>,
    pub(super) tensors: BTreeMap<&'a str, TensorInfo>,
}

/// One tensor of the table. Its range is inside the file, aligned, and overlaps no other.
pub(super) struct TensorInfo {
    /// Slowest dimension first.
    pub(super) shape: Vec<usize>,
    pub(super) storage: Storage,
    /// Byte range in the file.
    pub(super) range: Range<usize>,
}

impl<'a> GgufHeader<'a> {
    pub(super) fn parse(file: &'a Path, bytes: &'a [u8]) -> Result<Self, CheckpointError> {
        let mut reader = HeaderReader { file, bytes, at: 0 };
        if reader.take(4, "magic")? != b"GGUF" {
            return Err(CheckpointError::not_a_model(file, "not a GGUF file: it does not start with GGUF"));
        }
        let version = reader.u32("version")?;
        if !matches!(version, 2 | 3) {
            let found = if matches!(version.swap_bytes(), 2 | 3) {
                "big-endian".to_owned()
            } else {
                version.to_string()
            };
            return Err(CheckpointError::unsupported(file, "version", found, "2 and 3, little-endian"));
        }
        let num_tensors = reader.u64("tensor count")?;
        let num_fields = reader.u64("metadata count")?;

        let mut metadata = Metadata::new(file);
        for _ in 0..num_fields {
            let key = reader.key("metadata key")?;
            let value = reader.value(key)?;
            metadata.insert(key, value)?;
        }
        let alignment = metadata.integer("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            let problem = format!("{alignment}; a power of two up to {} is expected", 1 << 20);
            return Err(reader.malformed("general.alignment", problem));
        }

        let mut declared = Vec::new();
        for _ in 0..num_tensors {
            declared.push(reader.tensor()?);
        }
        let data_start = (reader.at as u64).next_multiple_of(alignment);
        let tensors = locate(&reader, declared, data_start, alignment)?;
        Ok(GgufHeader { version, metadata, tensors })
    }
}

/// A tensor as declared. The offset is relative to the start of the data and unchecked.
struct DeclaredTensor<'a> {
    name: &'a str,
    shape: Vec<usize>,
    storage: Storage,
    bytes: usize,
    offset: u64,
}

/// Checks the location of the tensors: aligned, inside the file, without overlap, with unique names.
fn locate<'a>(
    reader: &HeaderReader<'a>,
    declared: Vec<DeclaredTensor<'a>>,
    data_start: u64,
    alignment: u64,
) -> Result<BTreeMap<&'a str, TensorInfo>, CheckpointError> {
    let file_len = reader.bytes.len() as u64;
    let mut tensors = BTreeMap::new();
    for tensor in declared {
        let malformed = |problem: String| reader.malformed(format!("tensor {}", shown(tensor.name)), problem);
        let offset = tensor.offset;
        if !offset.is_multiple_of(alignment) {
            return Err(malformed(format!("offset {offset} is not a multiple of the alignment {alignment}")));
        }
        let start = data_start.checked_add(offset);
        let range = start.and_then(|start| Some((start, start.checked_add(tensor.bytes as u64)?)));
        let Some((start, end)) = range.filter(|&(_, end)| end <= file_len) else {
            let bytes = tensor.bytes;
            let problem =
                format!("{bytes} bytes at {data_start} + {offset}; the file has {file_len}; {TRUNCATED}");
            return Err(malformed(problem));
        };
        let info =
            TensorInfo { shape: tensor.shape, storage: tensor.storage, range: start as usize..end as usize };
        if tensors.insert(tensor.name, info).is_some() {
            return Err(malformed("two tensors have this name".to_owned()));
        }
    }

    let mut by_offset: Vec<_> = tensors.iter().map(|(name, info)| (&info.range, *name)).collect();
    by_offset.sort_by_key(|(range, _)| range.start);
    for pair in by_offset.windows(2) {
        let ((before, name), (after, other)) = (&pair[0], &pair[1]);
        if after.start < before.end {
            let problem = format!("bytes {before:?} overlap {after:?} of {}", shown(other));
            return Err(reader.malformed(format!("tensor {}", shown(name)), problem));
        }
    }
    Ok(tensors)
}

/// Reads the header sequentially. Every read checks that the bytes exist.
struct HeaderReader<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> HeaderReader<'a> {
    fn malformed(&self, field: impl Into<String>, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::malformed(self.file, field, problem)
    }

    fn take(&mut self, count: u64, field: &str) -> Result<&'a [u8], CheckpointError> {
        let rest = &self.bytes[self.at..];
        let Some(taken) = usize::try_from(count).ok().and_then(|count| rest.get(..count)) else {
            let length = self.bytes.len();
            let problem =
                format!("needs {count} bytes at byte {}; the file has {length}; {TRUNCATED}", self.at);
            return Err(self.malformed(shown(field), problem));
        };
        self.at += taken.len();
        if self.at > MAX_HEADER {
            let problem = format!("ends at byte {}; the limit of the header is {MAX_HEADER} bytes", self.at);
            return Err(self.malformed(shown(field), problem));
        }
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], CheckpointError> {
        let taken = self.take(N as u64, field)?;
        Ok(taken.try_into().expect("take returns the requested number of bytes; this is a bug"))
    }

    fn u32(&mut self, field: &str) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    fn u64(&mut self, field: &str) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    fn string_bytes(&mut self, field: &str) -> Result<&'a [u8], CheckpointError> {
        let length = self.u64(field)?;
        self.take(length, field)
    }

    fn string(&mut self, field: &str) -> Result<&'a str, CheckpointError> {
        let bytes = self.string_bytes(field)?;
        std::str::from_utf8(bytes).map_err(|error| self.malformed(shown(field), error.to_string()))
    }

    /// A non-empty string of limited length.
    fn key(&mut self, field: &str) -> Result<&'a str, CheckpointError> {
        let key = self.string(field)?;
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(self.malformed(field, format!("{} bytes; 1 to {MAX_KEY} are expected", key.len())));
        }
        Ok(key)
    }

    fn value(&mut self, key: &str) -> Result<MetadataValue<'a>, CheckpointError> {
        let value_type = self.u32(key)?;
        Ok(match value_type {
            8 => MetadataValue::Text(self.string(key)?),
            9 => self.array_value(key)?,
            value_type => {
                let Some(size) = scalar_bytes(value_type) else {
                    return Err(self.malformed(shown(key), format!("unknown value type {value_type}")));
                };
                let bytes = self.take(size, key)?;
                MetadataValue::scalar(value_type, bytes)
                    .ok_or_else(|| self.malformed(shown(key), "not a boolean"))?
            }
        })
    }

    /// An array is kept as its bytes; only its length is checked here. Nested arrays are rejected, because no known key
    /// uses them; so there is no recursion.
    fn array_value(&mut self, key: &str) -> Result<MetadataValue<'a>, CheckpointError> {
        let value_type = self.u32(key)?;
        let count = self.u64(key)?;
        let start = self.at;
        if value_type == 8 {
            if count > MAX_STRINGS {
                let problem = format!("an array of {count} strings; the limit is {MAX_STRINGS}");
                return Err(self.malformed(shown(key), problem));
            }
            for _ in 0..count {
                self.string_bytes(key)?;
            }
        } else {
            let Some(size) = scalar_bytes(value_type) else {
                return Err(self.malformed(
                    shown(key),
                    format!("an array of value type {value_type}; scalars and strings are expected"),
                ));
            };
            let Some(bytes) = count.checked_mul(size) else {
                return Err(self.malformed(shown(key), format!("an array of {count} values of {size} bytes")));
            };
            self.take(bytes, key)?;
        }
        // Each element takes at least one byte, so the count fits.
        Ok(MetadataValue::Array { value_type, count: count as usize, bytes: &self.bytes[start..self.at] })
    }

    fn tensor(&mut self) -> Result<DeclaredTensor<'a>, CheckpointError> {
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
        let ggml_type = self.u32(name)?;
        let offset = self.u64(name)?;

        let Some(storage) = storage(ggml_type) else {
            let field = format!("tensor {}", shown(name));
            return Err(CheckpointError::unsupported(
                self.file,
                field,
                type_name(ggml_type),
                Storage::SUPPORTED,
            ));
        };
        let columns = shape[0];
        if !columns.is_multiple_of(storage.block_elements() as u64) {
            let block = storage.block_elements();
            return Err(malformed(format!(
                "rows of {columns} elements; the block size of {storage} is {block}"
            )));
        }
        let elements =
            shape.iter().try_fold(1, |size: usize, &dimension| size.checked_mul(dimension.try_into().ok()?));
        let bytes = elements.filter(|&elements| elements > 0).and_then(|elements| storage.bytes_of(elements));
        let Some(bytes) = bytes else {
            return Err(malformed(format!("shape {shape:?} of {storage} has no valid size")));
        };
        let shape = shape.into_iter().rev().map(|dimension| dimension as usize).collect();
        Ok(DeclaredTensor { name, shape, storage, bytes, offset })
    }
}

fn storage(ggml_type: u32) -> Option<Storage> {
    Some(match ggml_type {
        0 => Storage::F32,
        1 => Storage::F16,
        2 => Storage::Q4_0,
        3 => Storage::Q4_1,
        6 => Storage::Q5_0,
        7 => Storage::Q5_1,
        8 => Storage::Q8_0,
        10 => Storage::Q2K,
        11 => Storage::Q3K,
        12 => Storage::Q4K,
        13 => Storage::Q5K,
        14 => Storage::Q6K,
        20 => Storage::Iq4Nl,
        23 => Storage::Iq4Xs,
        28 => Storage::F64,
        30 => Storage::Bf16,
        _ => return None,
    })
}

/// The name of an unsupported ggml type, for error messages.
fn type_name(ggml_type: u32) -> String {
    let name = match ggml_type {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        other => return format!("of ggml type {other}"),
    };
    name.to_owned()
}
