//! Reading one field: the right type and within its range, or an error that names the field, the value and the limit.

use std::ops::RangeInclusive;

use penstock_types::{FieldError, Named};

use crate::value::{Kind, Value};

/// The type that [`Field::token_ids`] reads, in words.
pub const TOKEN_IDS: &str = "a sequence of token ids (integers from 0)";

/// A field of a configuration or of a request, or an item of its value.
#[derive(Clone, Copy)]
pub struct Field {
    name: &'static str,
    /// The index of an item in a sequence, and in a sequence within it.
    positions: [Option<usize>; 2],
}

/// A value that is not allowed.
#[derive(Debug)]
pub struct Problem<V> {
    pub field: &'static str,
    /// The field's name with the index of the item, such as `stop[1]`.
    pub place: String,
    pub value: V,
    /// The allowed values; completes the sentence "it must be ...".
    pub limit: String,
}

/// A field cannot be read.
#[derive(Debug)]
pub enum ReadError<V: Value> {
    Field(Problem<V>),
    /// The caller's code raised an exception.
    Raised(V::Raised),
}

pub type Read<T, V> = Result<T, ReadError<V>>;

impl<V: Value> From<Problem<V>> for FieldError {
    fn from(problem: Problem<V>) -> Self {
        FieldError::new(problem.field, problem.value.quote(), problem.limit)
    }
}

impl Field {
    pub fn new(name: &'static str) -> Self {
        Self { name, positions: [None; 2] }
    }

    /// The error for `value`; `limit` completes the sentence "it must be ...".
    pub fn refuse<V: Value>(self, value: &V, limit: impl Into<String>) -> ReadError<V> {
        let positions = self.positions.iter().flatten().map(|position| format!("[{position}]"));
        let place = [self.name.to_owned()].into_iter().chain(positions).collect();
        ReadError::Field(Problem { field: self.name, place, value: value.clone(), limit: limit.into() })
    }

    /// An item of a sequence.
    fn item(self, position: usize) -> Self {
        let positions = match self.positions {
            [None, _] => [Some(position), None],
            [outer, _] => [outer, Some(position)],
        };
        Self { positions, ..self }
    }

    /// An integer in `range`; `bool` is not one.
    pub fn integer<V: Value>(self, value: &V, range: RangeInclusive<i128>) -> Read<i128, V> {
        let number = value.integer().map_err(ReadError::Raised)?;
        number.filter(|number| range.contains(number)).ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            self.refuse(value, format!("an integer from {low} to {high}"))
        })
    }

    /// One of a few integers; `bool` is not one.
    pub fn one_of<V: Value>(self, value: &V, choices: &[i128]) -> Read<i128, V> {
        let number = value.integer().map_err(ReadError::Raised)?;
        number.filter(|number| choices.contains(number)).ok_or_else(|| {
            let choices: Vec<_> = choices.iter().map(i128::to_string).collect();
            self.refuse(value, format!("one of {}", choices.join(", ")))
        })
    }

    /// A number that `is_allowed` accepts; `bool` is not one, NaN never is.
    pub fn number<V: Value>(self, value: &V, limit: &str, is_allowed: impl Fn(f64) -> bool) -> Read<f64, V> {
        let number = value.number().map_err(ReadError::Raised)?;
        number.filter(|number| is_allowed(*number)).ok_or_else(|| self.refuse(value, limit))
    }

    /// A number from `low` to `high`; if `high` is infinite, a number that is finite in single precision.
    pub fn range<V: Value>(self, value: &V, low: f64, high: f64) -> Read<f64, V> {
        let limit = match high.is_finite() {
            true => format!("a number from {low} to {high}"),
            false => format!("a finite number, at least {low}"),
        };
        self.number(value, &limit, |number| (low..=high).contains(&number) && (number as f32).is_finite())
    }

    /// A number above `low`, in single precision too, and at most `high`; if `high` is infinite, a number that is
    /// finite in single precision.
    pub fn above<V: Value>(self, value: &V, low: f64, high: f64) -> Read<f64, V> {
        let limit = match high.is_finite() {
            true => format!("a number above {low} and at most {high}"),
            false => format!("a finite number above {low}"),
        };
        let is_allowed = |number: f64| number as f32 > low as f32 && number <= high;
        self.number(value, &limit, |number| is_allowed(number) && (number as f32).is_finite())
    }

    /// A number from `low`, below `high` in single precision too.
    pub fn below<V: Value>(self, value: &V, low: f64, high: f64) -> Read<f64, V> {
        let limit = format!("a number of at least {low} and below {high}");
        self.number(value, &limit, |number| low <= number && (number as f32) < high as f32)
    }

    /// `True` or `False`.
    pub fn boolean<V: Value>(self, value: &V) -> Read<bool, V> {
        match value.kind() {
            Kind::Bool(flag) => Ok(flag),
            _ => Err(self.refuse(value, "True or False")),
        }
    }

    /// Text that can be encoded as UTF-8.
    pub fn text<V: Value>(self, value: &V) -> Read<String, V> {
        if value.kind() != Kind::Text {
            return Err(self.refuse(value, "a string"));
        }
        let text = value.text().map_err(ReadError::Raised)?;
        text.ok_or_else(|| self.refuse(value, "valid Unicode (it contains a lone surrogate)"))
    }

    /// Text of 1 to `max_chars` characters.
    pub fn text_within<V: Value>(self, value: &V, max_chars: usize) -> Read<String, V> {
        if value.kind() == Kind::Text
            && !(1..=max_chars).contains(&value.text_len().map_err(ReadError::Raised)?)
        {
            return Err(self.refuse(value, format!("a string of 1 to {max_chars} characters")));
        }
        self.text(value)
    }

    /// One of a few words.
    pub fn choice<V: Value, T: Named>(self, value: &V) -> Read<T, V> {
        let names = T::all().flat_map(|choice| choice.aliases().iter().copied().chain([choice.name()]));
        let longest = names.map(str::len).max().unwrap_or(0);
        let is_short = value.kind() == Kind::Text && value.text_len().map_err(ReadError::Raised)? <= longest;
        let text = if is_short { value.text().map_err(ReadError::Raised)? } else { None };
        text.and_then(|text| T::from_name(&text)).ok_or_else(|| {
            let names: Vec<_> = T::all().map(|choice| format!("'{}'", choice.name())).collect();
            self.refuse(value, format!("one of {}", names.join(", ")))
        })
    }

    /// At most `max_items` token ids from any iterable of integers; `expected` describes the type in words.
    pub fn token_ids<V: Value>(self, value: &V, max_items: usize, expected: &str) -> Read<Vec<u32>, V> {
        let token_id =
            |field: Field, item: &V| field.integer(item, 0..=i128::from(u32::MAX)).map(|id| id as u32);
        self.items(value, max_items, "ids", expected, token_id)
    }

    /// At most `max_items` items, read by `read`, from any iterable except strings, bytes and mappings. `noun` names
    /// the items and `expected` describes the type in words.
    pub fn items<V: Value, T>(
        self,
        value: &V,
        max_items: usize,
        noun: &str,
        expected: &str,
        read: impl Fn(Self, &V) -> Read<T, V>,
    ) -> Read<Vec<T>, V> {
        let items = value.items().map_err(ReadError::Raised)?;
        let mut items = items.ok_or_else(|| self.refuse(value, expected))?;
        let numbered = items.by_ref().take(max_items).enumerate();
        let read = numbered.map(|(index, item)| read(self.item(index), &item.map_err(ReadError::Raised)?));
        let read = read.collect::<Result<_, _>>()?;
        match items.next() {
            Some(_) => Err(self.refuse(value, format!("at most {max_items} {noun}"))),
            None => Ok(read),
        }
    }
}
