//! Reads the option `kv_events`: an address or a mapping.

use penstock_types::KvEvents;

use crate::field::{Field, Read, ReadError};
use crate::params::{check_keys, get};
use crate::value::{Kind, Value};

/// Maximum length of an address, a topic and a key, in characters.
const MAX_CHARS: usize = 1024;

/// The keys of the option.
const KEYS: [&str; 6] = ["endpoint", "replay_endpoint", "topic", "hash_key", "format", "rank"];

pub fn read_kv_events<V: Value>(field: Field, value: &V) -> Read<KvEvents, V> {
    if value.kind() == Kind::Text {
        return Ok(KvEvents { endpoint: Some(read_address(field, value)?), ..KvEvents::default() });
    }
    if value.kind() != Kind::Map {
        return Err(field.refuse(value, "an address or a mapping"));
    }
    check_keys(field, value, &KEYS)?;
    let present = |key| Ok(get(value, key)?.filter(|item: &V| item.kind() != Kind::Null));
    let text = |key| {
        let Some(item) = present(key)? else { return Ok(String::new()) };
        let is_short = item.kind() == Kind::Text && item.text_len().map_err(ReadError::Raised)? <= MAX_CHARS;
        let text = if is_short { item.text().map_err(ReadError::Raised)? } else { None };
        let limit = || format!("a mapping with a string of at most {MAX_CHARS} characters for '{key}'");
        text.ok_or_else(|| field.refuse(value, limit()))
    };
    let options = KvEvents {
        endpoint: present("endpoint")?.map(|address| read_address(field, &address)).transpose()?,
        replay_endpoint: present("replay_endpoint")?
            .map(|address| read_address(field, &address))
            .transpose()?,
        topic: text("topic")?,
        hash_key: text("hash_key")?,
        format: present("format")?.map_or_else(|| Ok(Default::default()), |format| field.choice(&format))?,
        rank: present("rank")?.map_or(Ok(0), |rank| field.integer(&rank, 0..=i128::from(i32::MAX)))? as u32,
    };
    if options.endpoint.is_none() && options.replay_endpoint.is_some() {
        return Err(field.refuse(value, "a mapping with an 'endpoint' beside the 'replay_endpoint'"));
    }
    Ok(options)
}

/// A ZMQ address, or the port of one on the loopback interface, or `host:port`.
fn read_address<V: Value>(field: Field, value: &V) -> Read<String, V> {
    let limit =
        "an address: 'tcp://HOST:PORT', 'HOST:PORT', 'PORT' (of the loopback interface), or 'ipc://PATH'";
    let text = match value.kind() {
        Kind::Integer(port) => port.to_string(),
        Kind::Text => field.text_within(value, MAX_CHARS)?,
        _ => return Err(field.refuse(value, limit)),
    };
    let address = match text.split_once("://") {
        Some(("ipc" | "inproc", name)) if !name.is_empty() => return Ok(text),
        Some(("tcp", address)) => address,
        Some(_) => return Err(field.refuse(value, limit)),
        None => &text,
    };
    let (host, port) = address.rsplit_once(':').unwrap_or(("127.0.0.1", address));
    let is_port =
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_host = !host.is_empty() && !host.contains(|other: char| other.is_whitespace() || other == '/');
    if !(is_port && is_host) {
        return Err(field.refuse(value, limit));
    }
    Ok(format!("tcp://{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use penstock_types::KvEventFormat;
    use serde_json::json;

    use super::*;

    fn read(value: serde_json::Value) -> Result<KvEvents, String> {
        read_kv_events(Field::new("kv_events"), &value).map_err(|error| match error {
            ReadError::Field(problem) => problem.limit,
            ReadError::Raised(never) => match never {},
        })
    }

    #[test]
    fn addresses_without_a_scheme_are_completed() {
        for (given, expected) in [
            (json!("5557"), "tcp://127.0.0.1:5557"),
            (json!("example.org:5557"), "tcp://example.org:5557"),
            (json!("tcp://*:5557"), "tcp://*:5557"),
            (json!({"endpoint": 5557}), "tcp://127.0.0.1:5557"),
            (json!({"endpoint": "[::1]:80"}), "tcp://[::1]:80"),
            (json!("ipc:///run/events"), "ipc:///run/events"),
        ] {
            assert_eq!(
                read(given.clone()).map(|read| read.endpoint),
                Ok(Some(expected.to_owned())),
                "{given}"
            );
        }
    }

    #[test]
    fn every_key_is_read() {
        let value = json!({
            "endpoint": "5557", "replay_endpoint": "5558", "topic": "kv@pod@model", "hash_key": "fleet",
            "format": "map", "rank": 3,
        });
        let expected = KvEvents {
            endpoint: Some("tcp://127.0.0.1:5557".to_owned()),
            replay_endpoint: Some("tcp://127.0.0.1:5558".to_owned()),
            topic: "kv@pod@model".to_owned(),
            hash_key: "fleet".to_owned(),
            format: KvEventFormat::Map,
            rank: 3,
        };
        assert_eq!(read(value), Ok(expected));
        assert_eq!(read(json!({"endpoint": null})), Ok(KvEvents::default()));
    }

    #[test]
    fn invalid_value_error_says_what_is_allowed() {
        for (value, words) in [
            (json!(5557), "an address or a mapping"),
            (json!("http://a:1"), "an address: "),
            (json!("a:b"), "an address: "),
            (json!("0"), "an address: "),
            (json!("70000"), "an address: "),
            (json!("ipc://"), "an address: "),
            (json!({"endpoint": []}), "an address: "),
            (json!({"port": 1}), "without the key \"port\""),
            (json!({"topic": 1}), "a string of at most 1024 characters for 'topic'"),
            (json!({"format": "list"}), "'map'"),
            (json!({"rank": -1}), "from 0"),
            (json!({"replay_endpoint": "5558"}), "an 'endpoint' beside"),
        ] {
            let error = read(value.clone()).expect_err(words);
            assert!(error.contains(words), "{value}: {error}");
        }
    }
}
