//! References within a JSON schema. The library looks up the parts of a reference as they are written; RFC 6901 has
//! escapes for them, in section 3 and, within a URI, in section 6.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::RangeFrom;

use serde_json::{Value, json};

use super::walk::each_schema;

/// Writes references so that the library finds their targets. A target that it cannot address, because a key on the
/// way has a slash, is moved into the definitions.
pub(super) fn resolve(schema: &mut Value) -> Result<(), String> {
    let mut escaped = BTreeMap::new();
    each_schema(schema, &mut |keywords| {
        if let Some(Value::String(reference)) = keywords.get("$ref")
            && reference.contains(['%', '~'])
            && let Some(path) = path(reference)
        {
            escaped.insert(reference.clone(), path);
        }
        Ok(())
    })?;
    escaped.retain(|_, path| follow(schema, path).is_some());
    if escaped.is_empty() {
        return Ok(());
    }
    let mut unaddressable: Vec<_> =
        escaped.values().filter(|path| path.iter().any(|key| key.contains('/'))).cloned().collect();
    unaddressable.sort_by_key(|path| std::cmp::Reverse(path.len())); // a target may be within another
    unaddressable.dedup();
    let mut moved = BTreeMap::new();
    let mut numbers = 0..;
    for path in unaddressable {
        if let Some(reference) = move_target(schema, &path, &mut numbers) {
            moved.insert(path, reference);
        }
    }
    each_schema(schema, &mut |keywords| {
        if let Some(Value::String(reference)) = keywords.get_mut("$ref")
            && let Some(path) = escaped.get(reference)
        {
            *reference = moved.get(path).cloned().unwrap_or_else(|| format!("#/{}", path.join("/")));
        }
        Ok(())
    })
}

/// The target of a reference as the library finds it.
pub(super) fn target<'schema>(schema: &'schema Value, reference: &str) -> Option<&'schema Value> {
    let path = reference.strip_prefix('#')?.trim_end_matches('/');
    path.split('/').skip(1).try_fold(schema, |value, key| match value {
        Value::Array(entries) => entries.get(key.parse::<usize>().ok()?),
        value => value.get(key),
    })
}

/// The keys on the way to a target; `None` for a reference that leads out of the schema.
fn path(reference: &str) -> Option<Vec<String>> {
    let pointer = percent_decode(reference.strip_prefix("#")?);
    let keys = pointer.strip_prefix('/')?.split('/');
    Some(keys.map(|key| key.replace("~1", "/").replace("~0", "~")).collect())
}

/// Text that is not valid after decoding is unchanged.
fn percent_decode(text: &str) -> Cow<'_, str> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..2).filter(|digits| byte == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let code = code.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok());
        decoded.push(code.unwrap_or(byte));
        rest = &after[if code.is_some() { 2 } else { 0 }..];
    }
    String::from_utf8(decoded).map_or(Cow::Borrowed(text), Cow::Owned)
}

fn follow<'schema>(schema: &'schema mut Value, path: &[String]) -> Option<&'schema mut Value> {
    path.iter().try_fold(schema, |value, key| match value {
        Value::Array(entries) => entries.get_mut(key.parse::<usize>().ok()?),
        value => value.get_mut(key),
    })
}

/// Moves a target into the definitions and leaves a reference in its place, which it returns. `None` if the schema's
/// definitions are malformed. Names that are not taken have one of `numbers`.
fn move_target(schema: &mut Value, path: &[String], numbers: &mut RangeFrom<u32>) -> Option<String> {
    let definitions = schema.as_object_mut()?.entry("$defs").or_insert_with(|| json!({})).as_object_mut()?;
    let name = numbers.map(|index| format!("moved-{index}")).find(|name| !definitions.contains_key(name))?;
    definitions.insert(name.clone(), Value::Null); // taken, even if the target is above it
    let reference = format!("#/$defs/{name}");
    let target = follow(schema, path)?;
    let target = std::mem::replace(target, json!({"$ref": reference}));
    schema["$defs"][&name] = target;
    Some(reference)
}
