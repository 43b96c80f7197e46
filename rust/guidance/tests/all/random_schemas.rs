//! Random schemas, most of them hostile: each is compiled or rejected, in bounded time and without a panic.

use std::time::{Duration, Instant};

use penstock_guidance::{GrammarSpec, GuidanceError};
use serde_json::{Map, Value, json};

use crate::common::{Random, bytes, compiler};

/// Far above the time of the slowest schema within the limits.
const PATIENCE: Duration = Duration::from_secs(5);

const NAMES: [&str; 6] = ["a", "b", "a/b", "minimum", "$ref", "é~"];
const PATTERNS: [&str; 8] = ["^a", "b$", r"^\\S+$", "[ab]{1,9}", "(a|b)*c", "", "^[^a-c]+$", r"\\d{2,}"];
const FORMATS: [&str; 6] = ["date", "time", "date-time", "uuid", "ipv6", "colour"];
const TYPES: [&str; 8] = ["null", "boolean", "number", "integer", "string", "array", "object", "text"];
const NUMBERS: [f64; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.1,
    7.0,
    1e-300,
    9_007_199_254_740_993.0,
    999_999_999_999_999_999.0,
    1e18,
    9_223_372_036_854_774_784.0,
    -9_223_372_036_854_775_808.0,
    18_446_744_073_709_551_615.0,
    3.5e38,
    f64::MAX,
    f64::MIN,
];

struct Generator(Random);

impl Generator {
    fn below(&mut self, limit: usize) -> usize {
        self.0.below(limit)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn number(&mut self) -> Value {
        match self.below(4) {
            0 => json!(self.below(20)),
            1 => json!(self.pick(&[i64::MIN, i64::MIN + 1, i64::MAX, 1 << 53, (1 << 53) + 1, -1])),
            2 => json!(u64::MAX - self.below(2_000) as u64),
            _ => json!(self.pick(&NUMBERS)),
        }
    }

    fn name(&mut self) -> &'static str {
        self.pick(&NAMES)
    }

    fn literal(&mut self, depth: usize) -> Value {
        match self.below(if depth > 0 { 7 } else { 5 }) {
            0 => Value::Null,
            1 => json!(self.below(2) == 0),
            2 | 3 => self.number(),
            4 => json!(self.name()),
            5 => (0..self.below(4)).map(|_| self.literal(depth - 1)).collect(),
            _ => Value::Object(
                (0..self.below(4)).map(|_| (self.name().into(), self.literal(depth - 1))).collect(),
            ),
        }
    }

    fn named(&mut self, names: &[&str], depth: usize) -> Value {
        let count = self.below(5);
        Value::Object((0..count).map(|_| (self.pick(names).into(), self.schema(depth))).collect())
    }

    /// Up to `limit` names with numbers.
    fn numbered(&mut self, limit: usize) -> Vec<String> {
        let first = self.below(1_000);
        (first..first + self.below(limit)).map(|number| format!("n{number}")).collect()
    }

    fn list(&mut self, depth: usize) -> Value {
        let limit = if self.below(20) == 0 { 30 } else { 4 };
        let count = self.below(limit);
        (0..count).map(|_| self.schema(depth)).collect()
    }

    fn schema(&mut self, depth: usize) -> Value {
        if depth == 0 || self.below(12) == 0 {
            return match self.below(4) {
                0 => json!(self.below(2) == 0),
                1 => json!({"$ref": self.reference()}),
                _ => json!({"type": self.pick(&TYPES)}),
            };
        }
        let mut keywords = Map::new();
        for _ in 0..1 + self.below(4) {
            let (keyword, value) = self.keyword(depth - 1);
            keywords.insert(keyword.into(), value);
        }
        Value::Object(keywords)
    }

    fn reference(&mut self) -> &'static str {
        self.pick(&[
            "#",
            "#/",
            "#/$defs/a",
            "#/$defs/b",
            "#/$defs/a~1b",
            "#/%24defs/%C3%A9~0",
            "#/properties/a~1b",
            "#/allOf/0",
            "#/const",
            "#/missing",
            "other.json",
        ])
    }

    fn keyword(&mut self, depth: usize) -> (&'static str, Value) {
        let counts = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];
        match self.below(24) {
            0 => ("type", json!(self.pick(&TYPES))),
            1 => ("type", (0..self.below(5)).map(|_| json!(self.pick(&TYPES))).collect()),
            2 => ("const", self.literal(2)),
            3 => ("enum", (0..self.below(6)).map(|_| self.literal(2)).collect()),
            4 | 5 => ("allOf", self.list(depth)),
            6 | 7 => ("anyOf", self.list(depth)),
            8 => ("oneOf", self.list(depth)),
            9 | 10 => ("$ref", json!(self.reference())),
            11 => ("items", if self.below(3) == 0 { self.list(depth) } else { self.schema(depth) }),
            12 => ("prefixItems", self.list(depth)),
            13 => ("additionalItems", self.schema(depth)),
            14 | 15 => ("properties", self.named(&NAMES, depth)),
            16 if self.below(4) == 0 => ("patternProperties", {
                Value::Object(self.numbered(12).into_iter().map(|name| (name, json!({}))).collect())
            }),
            16 => ("patternProperties", self.named(&PATTERNS, depth)),
            17 => ("additionalProperties", self.schema(depth)),
            18 if self.below(4) == 0 => {
                ("required", self.numbered(300).into_iter().map(Value::from).collect())
            }
            18 => ("required", (0..self.below(6)).map(|_| json!(self.name())).collect()),
            19 => (self.pick(&counts), self.number()),
            20 => ("pattern", json!(self.pick(&PATTERNS))),
            21 => ("format", json!(self.pick(&FORMATS))),
            22 => (self.pick(&["minimum", "exclusiveMinimum", "multipleOf"]), self.number()),
            _ => match self.below(3) {
                0 => ("exclusiveMaximum", json!(true)),
                1 => ("$defs", self.named(&NAMES, depth)),
                _ => (self.pick(&["maximum", "exclusiveMaximum"]), self.number()),
            },
        }
    }
}

fn check(seeds: std::ops::Range<u64>) {
    let compiler = compiler(&bytes());
    let mut compiled = 0;
    for seed in seeds.clone() {
        let mut generator = Generator(Random(seed));
        let mut schema = generator.schema(4);
        if let Value::Object(keywords) = &mut schema {
            keywords.entry("$defs").or_insert_with(|| generator.named(&NAMES, 3));
        }
        let source = schema.to_string();
        let grammar = match generator.below(8) {
            0 => GrammarSpec::Lark(format!("start: a\na: %json {source}")),
            1..4 => GrammarSpec::LenientJsonSchema(source.clone()),
            _ => GrammarSpec::JsonSchema(source.clone()),
        };
        let begin = Instant::now();
        match compiler.compile(&grammar) {
            Ok(_) => compiled += 1,
            Err(
                GuidanceError::Invalid { .. }
                | GuidanceError::Unsupported { .. }
                | GuidanceError::TooComplex { .. }
                | GuidanceError::DeadEnd { .. },
            ) => {}
            Err(error) => panic!("seed {seed}: {source}: {error}"),
        }
        assert!(begin.elapsed() < PATIENCE, "seed {seed}: {source} took {:?}", begin.elapsed());
    }
    assert!(compiled > (seeds.end - seeds.start) / 50, "only {compiled} schemas are valid");
}

#[test]
fn random_schemas_are_compiled_or_rejected() {
    check(0..2_000);
}

#[test]
#[ignore = "takes minutes; `make test-schemas` runs it"]
fn a_million_random_schemas_are_compiled_or_rejected() {
    let begins = (0..1_000_000).step_by(125_000);
    let threads: Vec<_> =
        begins.map(|begin| std::thread::spawn(move || check(begin..begin + 125_000))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
