//! Readers of the fields whose form does not follow from their type.

use penstock_types::{Device, Json};

pub use super::kv_events::read_kv_events;
pub use super::quantization::read_quantization;
use crate::field::{Field, Read, ReadError};
use crate::params::read_json;
use crate::value::{Kind, Value};

/// Linux has at most 1024 nodes.
const MAX_NUMA_NODE: i128 = 1023;

/// Maximum length of a device's name in characters.
const MAX_DEVICE_CHARS: usize = 64;

pub fn read_device<V: Value>(field: Field, value: &V) -> Read<Device, V> {
    let is_short =
        value.kind() == Kind::Text && value.text_len().map_err(ReadError::Raised)? <= MAX_DEVICE_CHARS;
    let name = if is_short { value.text().map_err(ReadError::Raised)? } else { None };
    name.and_then(|name| Device::from_name(&name))
        .ok_or_else(|| field.refuse(value, "'auto', 'cpu', 'cuda', or 'cuda:1' with another index"))
}

pub fn read_numa_nodes<V: Value>(field: Field, value: &V, max_items: usize) -> Read<Vec<usize>, V> {
    let read = |field: Field, node: &V| field.integer(node, 0..=MAX_NUMA_NODE).map(|node| node as usize);
    field.items(value, max_items, "nodes", "a sequence of NUMA nodes (integers from 0)", read)
}

pub fn read_overrides<V: Value>(field: Field, value: &V) -> Read<Json, V> {
    match value.kind() {
        Kind::Map => read_json(field, value),
        _ => Err(field.refuse(value, "a mapping of names in config.json to values")),
    }
}

pub fn read_path<V: Value>(field: Field, value: &V) -> Read<String, V> {
    let path = value.path().map_err(ReadError::Raised)?.ok_or_else(|| field.refuse(value, "a path"))?;
    path.into_os_string().into_string().map_err(|_| field.refuse(value, "a path that is valid Unicode"))
}
