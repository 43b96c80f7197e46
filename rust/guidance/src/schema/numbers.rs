//! Numbers of a JSON schema. The library reads them as `f64` and computes the bounds of integers as `i64`.

use serde_json::{Map, Number, Value};

use super::walk::LITERALS;

/// The largest `f64` below 2^63. With the bound -2^63 the library recurses without end.
const LARGEST: f64 = 9_223_372_036_854_774_784.0;
/// The library needs a second bound beyond a bound of this magnitude, which has 19 digits.
const NEEDS_TWO_BOUNDS: f64 = 1e18;
/// Integers of a lower magnitude are exact, and so are their neighbours.
const EXACT: f64 = 9_007_199_254_740_992.0;
/// Keywords whose value is a natural number.
const COUNTS: [&str; 6] =
    ["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"];

/// The keywords of one bound. A lower bound is the upper bound of the negated values.
struct Bound {
    inclusive: &'static str,
    exclusive: &'static str,
    sign: f64,
}

const LOWER: Bound = Bound { inclusive: "minimum", exclusive: "exclusiveMinimum", sign: -1.0 };
const UPPER: Bound = Bound { inclusive: "maximum", exclusive: "exclusiveMaximum", sign: 1.0 };

/// Narrows bounds beyond 2^53 to numbers that the library computes with exactly, so that no value outside the schema
/// is allowed. Bounds that hold for every `f64` are dropped, unless the value is an integer.
pub(super) fn narrow_bounds(keywords: &mut Map<String, Value>) -> Result<(), String> {
    LOWER.narrow(keywords)?;
    UPPER.narrow(keywords)?;
    LOWER.ensure_opposite(keywords, &UPPER);
    UPPER.ensure_opposite(keywords, &LOWER);
    Ok(())
}

impl Bound {
    fn narrow(&self, keywords: &mut Map<String, Value>) -> Result<(), String> {
        let large = |keyword: &str| {
            keywords
                .get(keyword)
                .and_then(Value::as_number)
                .filter(|number| magnitude(number) >= EXACT)
                .cloned()
        };
        let (inclusive, exclusive) = (large(self.inclusive), large(self.exclusive));
        // In draft 4 the exclusive keyword is a boolean that applies to the other.
        let is_strict = keywords.get(self.exclusive) == Some(&Value::Bool(true));
        let bounds = inclusive.as_ref().map(|number| (self.inclusive, number, is_strict));
        let bounds =
            bounds.into_iter().chain(exclusive.as_ref().map(|number| (self.exclusive, number, true)));
        let mut narrowed: Option<f64> = None;
        for (keyword, number, is_strict) in bounds {
            let value = self.round_inward(number, is_strict);
            if value < -LARGEST {
                let limit = (-self.sign * LARGEST) as i64;
                return Err(format!("{keyword} is {number}; the limit is {limit}"));
            }
            narrowed = Some(narrowed.map_or(value, |other| other.min(value)));
        }
        let Some(value) = narrowed else { return Ok(()) };
        if exclusive.is_some() || is_strict {
            keywords.remove(self.exclusive);
        }
        let other = keywords.get(self.inclusive).and_then(Value::as_f64).map(|other| other * self.sign);
        let value = other.filter(|_| inclusive.is_none()).map_or(value, |other| other.min(value));
        if value == f64::MAX && !allows_integer(keywords) {
            keywords.remove(self.inclusive);
        } else {
            let value = self.sign * value.min(LARGEST);
            keywords.insert(self.inclusive.into(), number(value));
        }
        Ok(())
    }

    /// The nearest `f64` within the bound, times the sign.
    fn round_inward(&self, number: &Number, is_strict: bool) -> f64 {
        let nearest = number.as_f64().unwrap_or(f64::MAX) * self.sign;
        let exact = number.as_i128().map(|exact| exact * self.sign as i128);
        let excess = exact.map_or(0, |exact| nearest as i128 - exact);
        if excess > 0 || (is_strict && excess == 0) { nearest.next_down() } else { nearest }
    }

    /// Adds the opposite bound if this one alone is too large for the library.
    fn ensure_opposite(&self, keywords: &mut Map<String, Value>, opposite: &Self) {
        let bound = keywords.get(self.inclusive).and_then(Value::as_f64).map(|bound| bound * self.sign);
        let is_alone = !keywords.contains_key(opposite.inclusive)
            && !keywords.get(opposite.exclusive).is_some_and(Value::is_number);
        if bound.is_some_and(|bound| bound <= -NEEDS_TWO_BOUNDS) && is_alone {
            keywords.insert(opposite.inclusive.into(), number(opposite.sign * LARGEST));
        }
    }
}

fn magnitude(number: &Number) -> f64 {
    number.as_f64().map_or(f64::MAX, f64::abs)
}

fn allows_integer(keywords: &Map<String, Value>) -> bool {
    match keywords.get("type") {
        Some(Value::Array(types)) => types.iter().any(|name| name == "integer"),
        Some(name) => name == "integer",
        None => false,
    }
}

/// A value that the library reads as exactly this number.
fn number(value: f64) -> Value {
    let is_integer = value.fract() == 0.0 && value.abs() <= LARGEST;
    if is_integer { Value::from(value as i64) } else { Value::from(value) }
}

/// Rejects numbers in `const` and `enum` that the library would replace by others.
pub(super) fn check_literals(keywords: &Map<String, Value>) -> Result<(), String> {
    fn check(keyword: &str, value: &Value) -> Result<(), String> {
        match value {
            Value::Array(entries) => entries.iter().try_for_each(|entry| check(keyword, entry)),
            Value::Object(entries) => entries.values().try_for_each(|entry| check(keyword, entry)),
            Value::Number(number) if magnitude(number) > LARGEST => {
                Err(format!("{keyword} has the number {number}; the limit is {}", LARGEST as i64))
            }
            Value::Number(number)
                if number
                    .as_i128()
                    .is_some_and(|exact| number.as_f64().map(|it| it as i128) != Some(exact)) =>
            {
                Err(format!(
                    "{keyword} has the integer {number}, which has no exact 64-bit floating-point value; use a string"
                ))
            }
            _ => Ok(()),
        }
    }
    let literals = LITERALS.iter().filter_map(|&keyword| Some((keyword, keywords.get(keyword)?)));
    literals.into_iter().try_for_each(|(keyword, value)| check(keyword, value))
}

/// Writes natural numbers such as 3.0 without a fraction, as the library reads them.
pub(super) fn write_counts_as_integers(keywords: &mut Map<String, Value>) {
    for keyword in COUNTS {
        if let Some(value) = keywords.get_mut(keyword)
            && let Some(count) =
                value.as_f64().filter(|count| count.fract() == 0.0 && (0.0..EXACT).contains(count))
        {
            *value = Value::from(count as u64);
        }
    }
}
