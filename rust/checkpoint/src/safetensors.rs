//! Parser of safetensors headers: eight bytes of length, a JSON object of tensors, then the data.
//!
//! The `safetensors` crate is only the reference in the tests, for three reasons: its errors name neither the tensor
//! nor the numbers, the last of two tensors with the same name silently wins, and parsing a header of the maximum size
//! takes many times its size in memory.

use std::collections::{BTreeMap, btree_map};
use std::fmt;
use std::ops::Range;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{CheckpointError, TRUNCATED, shown};
use crate::mapped::MappedFile;
use crate::packed::Location;
use crate::storage::Storage;
use crate::tensor::{RowOrder, StoredType, TensorEntry};

/// The format's limit.
const MAX_HEADER: u64 = 100_000_000;
const MAX_DIMENSIONS: usize = 8;

/// The bytes that the headers of the files of one model may still have together: as many as the header of one file.
/// Parsed tensors take several times their bytes in a header.
pub(crate) struct HeaderBytes(u64);

impl Default for HeaderBytes {
    fn default() -> Self {
        Self(MAX_HEADER)
    }
}

/// The tensors of a file. Their ranges cover the data after the header exactly, without overlap.
pub(crate) fn tensors(
    file: &MappedFile,
    index: usize,
    header_bytes: &mut HeaderBytes,
) -> Result<BTreeMap<String, TensorEntry>, CheckpointError> {
    let bytes = file.bytes();
    let malformed = |field: &str, problem: String| CheckpointError::malformed(file.path(), field, problem);

    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(malformed(
            "header length",
            format!("needs 8 bytes; the file has {}; {TRUNCATED}", bytes.len()),
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(malformed("header length", format!("{length} bytes; the limit is {MAX_HEADER}")));
    }
    if length > rest.len() as u64 {
        let rest = rest.len();
        return Err(malformed("header length", format!("{length} bytes; the file has {rest}; {TRUNCATED}")));
    }
    header_bytes.0 = header_bytes.0.checked_sub(length).ok_or_else(|| {
        let total = MAX_HEADER - header_bytes.0 + length;
        malformed(
            "header length",
            format!(
                "{total} bytes with the files before; the limit is {MAX_HEADER} for all files of a model"
            ),
        )
    })?;
    let (header, data) = rest.split_at(length as usize);
    let data_start = 8 + header.len();
    let parsed = std::str::from_utf8(header)
        .map_err(|error| error.to_string())
        .and_then(|header| serde_json::from_str(header).map_err(|error| error.to_string()));
    let SafetensorsHeader(declared) = parsed.map_err(|error| malformed("header", shown(&error)))?;

    let mut tensors = BTreeMap::new();
    for (name, declaration) in declared {
        let entry = declaration
            .entry(data.len(), data_start, index)
            .map_err(|problem| malformed(&format!("tensor {}", shown(&name)), problem))?;
        tensors.insert(name, entry);
    }

    let mut by_offset: Vec<_> = tensors.iter().map(|(name, entry)| (&entry.at.range, name)).collect();
    by_offset.sort_by_key(|(range, _)| (range.start, range.end));
    let mut end = data_start;
    for (range, name) in by_offset {
        if range.start != end {
            let (start, expected) = (range.start - data_start, end - data_start);
            let problem =
                format!("starts at byte {start} of the data; the previous tensors end at {expected}");
            return Err(malformed(&format!("tensor {}", shown(name)), problem));
        }
        end = range.end;
    }
    if end != bytes.len() {
        let problem = format!("{} bytes; the tensors cover {}", data.len(), end - data_start);
        return Err(malformed("data", problem));
    }
    Ok(tensors)
}

struct SafetensorsHeader(BTreeMap<String, TensorDeclaration>);

#[derive(serde::Deserialize)]
struct TensorDeclaration {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Shape(Vec<u64>);

impl TensorDeclaration {
    fn entry(self, data_len: usize, data_start: usize, file: usize) -> Result<TensorEntry, String> {
        let (bits, stored) =
            stored(&self.dtype).ok_or_else(|| format!("unknown dtype {}", shown(&self.dtype)))?;
        let Shape(shape) = self.shape;
        let size =
            shape.iter().try_fold(1, |size: usize, &dimension| size.checked_mul(dimension.try_into().ok()?));
        let bytes = size.and_then(|size| size.checked_mul(bits)).filter(|bits| bits.is_multiple_of(8));
        let Some(bytes) = bytes.map(|bits| bits / 8) else {
            return Err(format!("shape {shape:?} of {} has no valid size in bytes", self.dtype));
        };
        let (start, end) = self.data_offsets;
        if start > end {
            return Err(format!("data_offsets {start}..{end}"));
        }
        if end > data_len as u64 {
            let problem = format!("data_offsets {start}..{end}; the data has {data_len} bytes; {TRUNCATED}");
            return Err(problem);
        }
        if end - start != bytes as u64 {
            let given = end - start;
            return Err(format!(
                "shape {shape:?} of {} needs {bytes} bytes; data_offsets specify {given}",
                self.dtype
            ));
        }
        let range = Range { start: data_start + start as usize, end: data_start + end as usize };
        // Lossless: the size computation above has converted each dimension.
        let shape = shape.into_iter().map(|dimension| dimension as usize).collect();
        Ok(TensorEntry { at: Location { file, range }, shape, stored, order: RowOrder::AsStored })
    }
}

/// Bits per element of a dtype, and its stored type.
fn stored(dtype: &str) -> Option<(usize, StoredType)> {
    const OTHER: [(usize, &str); 18] = [
        (4, "F4"),
        (6, "F6_E2M3"),
        (6, "F6_E3M2"),
        (8, "BOOL"),
        (8, "U8"),
        (8, "I8"),
        (8, "F8_E4M3"),
        (8, "F8_E4M3FNUZ"),
        (8, "F8_E5M2"),
        (8, "F8_E5M2FNUZ"),
        (8, "F8_E8M0"),
        (16, "I16"),
        (16, "U16"),
        (32, "I32"),
        (32, "U32"),
        (64, "I64"),
        (64, "U64"),
        (64, "C64"),
    ];
    Some(match dtype {
        "F64" => (64, StoredType::Weights(Storage::F64)),
        "F32" => (32, StoredType::Weights(Storage::F32)),
        "F16" => (16, StoredType::Weights(Storage::F16)),
        "BF16" => (16, StoredType::Weights(Storage::Bf16)),
        _ => OTHER
            .iter()
            .find(|(_, name)| *name == dtype)
            .map(|&(bits, name)| (bits, StoredType::Other(name)))?,
    })
}

impl<'de> Deserialize<'de> for SafetensorsHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = SafetensorsHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SafetensorsHeader, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    match tensors.entry(name) {
                        btree_map::Entry::Vacant(place) => {
                            place.insert(map.next_value::<TensorDeclaration>()?)
                        }
                        btree_map::Entry::Occupied(place) => {
                            let name = shown(place.key());
                            return Err(de::Error::custom(format_args!("two tensors have the name {name}")));
                        }
                    };
                }
                Ok(SafetensorsHeader(tensors))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMENSIONS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = list.next_element()? {
                    if shape.len() == MAX_DIMENSIONS {
                        return Err(de::Error::invalid_length(shape.len() + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}
