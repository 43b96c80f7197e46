//! JSON as the values of fields, for tests.

use std::convert::Infallible;

use serde_json::Value as JsonValue;

use crate::value::{Kind, Value};

impl Value for JsonValue {
    type Raised = Infallible;

    fn kind(&self) -> Kind {
        match self {
            JsonValue::Null => Kind::Null,
            JsonValue::Bool(flag) => Kind::Bool(*flag),
            JsonValue::Number(number) if number.is_f64() => Kind::Float(number.as_f64().unwrap_or(f64::NAN)),
            JsonValue::Number(number) => number.as_i128().map_or(Kind::Other, Kind::Integer),
            JsonValue::String(_) => Kind::Text,
            JsonValue::Array(_) => Kind::Array,
            JsonValue::Object(_) => Kind::Map,
        }
    }

    fn integer(&self) -> Result<Option<i128>, Infallible> {
        Ok(self.as_i64().map(i128::from).or_else(|| self.as_u64().map(i128::from)))
    }

    fn number(&self) -> Result<Option<f64>, Infallible> {
        Ok(self.as_f64())
    }

    fn text_len(&self) -> Result<usize, Infallible> {
        Ok(self.as_str().map_or(0, |text| text.chars().count()))
    }

    fn text(&self) -> Result<Option<String>, Infallible> {
        Ok(self.as_str().map(str::to_owned))
    }

    fn items(&self) -> Result<Option<impl Iterator<Item = Result<Self, Infallible>>>, Infallible> {
        Ok(self.as_array().map(|items| items.iter().cloned().map(Ok)))
    }

    fn array(&self) -> impl Iterator<Item = Self> {
        self.as_array().into_iter().flatten().cloned()
    }

    fn map_len(&self) -> Result<usize, Infallible> {
        Ok(self.as_object().map_or(0, serde_json::Map::len))
    }

    fn entries(&self) -> Result<Vec<(Self, Self)>, Infallible> {
        let entries = self.as_object().into_iter().flatten();
        Ok(entries.map(|(key, value)| (JsonValue::from(key.as_str()), value.clone())).collect())
    }

    fn get(&self, key: &str) -> Result<Option<Self>, Infallible> {
        Ok(self.as_object().and_then(|map| map.get(key)).cloned())
    }

    fn quote(&self) -> String {
        self.to_string()
    }
}
