//! Readers of the parameters whose form does not follow from their type.

use penstock_text::MAX_STOP_BYTES;

use crate::field::{Field, Read, ReadError, TOKEN_IDS};
use crate::value::{Kind, Value};

/// Values added to the logits of token ids, in ascending order of the ids. Zeros are positive, so that equal values
/// print equally.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitBias(pub Vec<(u32, f64)>);

impl LogitBias {
    pub fn read<V: Value>(field: Field, value: &V, max_items: usize, low: f64, high: f64) -> Read<Self, V> {
        if value.kind() != Kind::Map {
            let limit = format!("a mapping of token ids (integers from 0) to numbers from {low} to {high}");
            return Err(field.refuse(value, limit));
        }
        if value.map_len().map_err(ReadError::Raised)? > max_items {
            return Err(field.refuse(value, format!("at most {max_items} ids")));
        }
        let pair = |(id, bias): (V, V)| {
            let token = read_token_key(&id).map_err(ReadError::Raised)?;
            let token = token.ok_or_else(|| field.refuse(&id, "token ids (integers from 0) as keys"))?;
            let limit = format!("a number from {low} to {high}, the bias of token {token}");
            let bias = field.number(&bias, &limit, |bias| (low..=high).contains(&bias))?;
            Ok((token, bias + 0.0))
        };
        let entries = value.entries().map_err(ReadError::Raised)?;
        let mut biases = entries.into_iter().map(pair).collect::<Result<Vec<_>, _>>()?;
        biases.sort_unstable_by_key(|(id, _)| *id);
        if let Some(pair) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(field.refuse(value, format!("a mapping that has token {} once", pair[0].0)));
        }
        Ok(Self(biases))
    }
}

/// A token id as a key: an integer, or its digits, because the keys of a JSON object are strings.
fn read_token_key<V: Value>(key: &V) -> Result<Option<u32>, V::Raised> {
    const MAX_DIGITS: usize = 10;
    if key.kind() != Kind::Text {
        return Ok(key.integer()?.and_then(|number| u32::try_from(number).ok()));
    }
    let text = if key.text_len()? <= MAX_DIGITS { key.text()? } else { None };
    let digits = text.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    Ok(digits.and_then(|digits| digits.parse().ok()))
}

/// Reads `top_k`; -1 disables the filter, as 0 does.
pub fn read_top_k<V: Value>(field: Field, value: &V, low: i128, high: i128) -> Read<u32, V> {
    match value.integer().map_err(ReadError::Raised)? {
        Some(number) if (low..=high).contains(&number) => Ok(number.max(0) as u32),
        _ => Err(field.refuse(value, format!("an integer from {low} to {high}; -1 and 0 keep all"))),
    }
}

/// Reads `logprobs`. The error for a number names `top_logprobs`, because other engines take a number here.
pub fn read_logprobs<V: Value>(field: Field, value: &V) -> Read<bool, V> {
    match value.kind() {
        Kind::Bool(flag) => Ok(flag),
        _ => Err(field.refuse(value, "True or False; the number of most likely tokens is top_logprobs")),
    }
}

pub fn read_token_ids<V: Value>(field: Field, value: &V, max_items: usize) -> Read<Vec<u32>, V> {
    field.token_ids(value, max_items, TOKEN_IDS)
}

pub fn read_allowed<V: Value>(field: Field, value: &V, max_items: usize) -> Read<Vec<u32>, V> {
    let ids = read_token_ids(field, value, max_items)?;
    if ids.is_empty() { Err(field.refuse(value, "left out, or at least one id")) } else { Ok(ids) }
}

pub fn read_texts<V: Value>(
    field: Field,
    value: &V,
    max_items: usize,
    max_chars: usize,
) -> Read<Vec<String>, V> {
    let read = |field: Field, text: &V| field.text_within(text, max_chars);
    field.items(value, max_items, "strings", "a sequence of strings", read)
}

/// Reads a list of choices. Their lengths have the sum `max_chars` at most.
pub fn read_choice<V: Value>(
    field: Field,
    value: &V,
    max_items: usize,
    max_chars: usize,
) -> Read<Vec<String>, V> {
    let texts = read_texts(field, value, max_items, max_chars)?;
    let num_chars: usize = texts.iter().map(|text| text.chars().count()).sum();
    if num_chars == 0 {
        Err(field.refuse(value, "left out, or at least one string"))
    } else if num_chars > max_chars {
        Err(field.refuse(value, format!("strings of at most {max_chars} characters in all")))
    } else {
        Ok(texts)
    }
}

/// Reads stop strings; one string stands for a sequence of one.
pub fn read_stops<V: Value>(
    field: Field,
    value: &V,
    max_items: usize,
    max_chars: usize,
) -> Read<Vec<String>, V> {
    if value.kind() == Kind::Text {
        return Ok(vec![field.text_within(value, max_chars)?]);
    }
    let read = |field: Field, text: &V| field.text_within(text, max_chars);
    let stops = field.items(value, max_items, "strings", "a string or a sequence of strings", read)?;
    if stops.iter().map(String::len).sum::<usize>() > MAX_STOP_BYTES {
        return Err(field.refuse(value, format!("strings of at most {MAX_STOP_BYTES} bytes in all")));
    }
    Ok(stops)
}

pub fn read_id_sequences<V: Value>(
    field: Field,
    value: &V,
    max_items: usize,
    max_ids: usize,
) -> Read<Vec<Vec<u32>>, V> {
    let expected = "a sequence of sequences of token ids (integers from 0)";
    let read = |field: Field, item: &V| match field.token_ids(item, max_ids, expected)? {
        ids if ids.is_empty() => Err(field.refuse(item, "a sequence of at least one id")),
        ids => Ok(ids),
    };
    field.items(value, max_items, "sequences", expected, read)
}
