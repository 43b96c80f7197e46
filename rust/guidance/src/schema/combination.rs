//! An upper bound on the work of combining schemas.
//!
//! Keywords that apply to the same value are parts of an intersection. The library multiplies out their alternatives
//! (`anyOf`, `oneOf`, `enum`): for each of them it copies the other parts. It descends into properties and items that
//! several parts constrain, and only there, and at the value itself, it replaces references by their definitions.

use std::collections::{HashMap, HashSet};
use std::ptr;

use serde_json::{Map, Value};

use super::references::target;

/// Keywords that do not constrain a value.
const ANNOTATIONS: [&str; 13] = [
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];
/// Keywords that add parts or alternatives.
const COMBINING: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];
const ITEMS: [&str; 3] = ["additionalItems", "items", "prefixItems"];
/// The library stops after this number of combinations.
const MAX_COMBINATIONS: usize = 50_000;
/// A schema without `type` becomes one alternative for each type.
const TYPES: usize = 6;
/// Maximum number of parts that the estimate visits. It is incomplete if there are more.
pub(super) const MAX_VISITS: usize = 1_000_000;

/// A constraint on a value.
#[derive(Clone, Copy)]
enum Constraint<'schema> {
    Schema(&'schema Value),
    /// The only valid value.
    Literal(&'schema Value),
}

/// A constraint of which no keyword is combining.
#[derive(Clone, Copy)]
enum Part<'schema> {
    /// The other keywords of a schema.
    Own(&'schema Map<String, Value>),
    /// The only valid value.
    Literal(&'schema Value),
}

/// Alternatives, one of which applies.
#[derive(Default)]
struct Alternatives<'schema> {
    parts: Vec<Part<'schema>>,
    count: usize,
}

/// Work summed over the intersections of a schema.
pub(super) struct Combinations<'schema> {
    root: &'schema Value,
    pub(super) copied_bytes: usize,
    /// Pairs of properties or alternatives.
    pub(super) pairs: usize,
    /// Whether any schema is an intersection.
    pub(super) intersects: bool,
    /// The targets of references, by the address of their text.
    targets: HashMap<*const u8, Option<&'schema Value>>,
    bytes: HashMap<*const Value, usize>,
    counts: HashMap<*const Value, usize>,
    /// The largest number of copies that was counted for parts.
    combined: HashMap<Vec<*const ()>, usize>,
    /// The schemas that are being collected, each an in-place part of the one before.
    within: HashSet<*const Value>,
    pub(super) visits: usize,
}

impl<'schema> Combinations<'schema> {
    pub(super) fn new(root: &'schema Value) -> Self {
        let mut combinations = Self {
            root,
            copied_bytes: 0,
            pairs: 0,
            intersects: false,
            targets: HashMap::new(),
            bytes: HashMap::new(),
            counts: HashMap::new(),
            combined: HashMap::new(),
            within: HashSet::new(),
            visits: 0,
        };
        combinations.measure(root);
        combinations
    }

    /// Adds the intersection that a schema is.
    pub(super) fn add(&mut self, schema: &'schema Value) {
        let conjuncts = self.conjuncts(Constraint::Schema(schema));
        self.intersects |= conjuncts.len() > 1;
        self.combine(conjuncts, 1);
        if let Some(Value::Array(schemas)) = schema.get("oneOf") {
            self.exclude(schemas);
        }
    }

    /// Records the bytes of a value and of its parts.
    fn measure(&mut self, value: &'schema Value) -> usize {
        let bytes = 8 + match value {
            Value::String(text) => text.len(),
            Value::Array(entries) => entries.iter().map(|entry| self.measure(entry)).sum(),
            Value::Object(entries) => {
                let entries = entries.iter();
                let compiled = entries.filter(|(key, entry)| !(entry.is_string() && is_annotation(key)));
                compiled.map(|(key, entry)| key.len() + self.measure(entry)).sum()
            }
            _ => 0,
        };
        self.bytes.insert(ptr::from_ref(value), bytes);
        bytes
    }

    /// The parts of the intersection that a constraint is, with references replaced by their definitions.
    fn conjuncts(&mut self, constraint: Constraint<'schema>) -> Vec<Alternatives<'schema>> {
        let mut found = Vec::new();
        match constraint {
            Constraint::Schema(schema) => self.collect(schema, &mut found),
            Constraint::Literal(value) => {
                found.push(Alternatives { parts: vec![Part::Literal(value)], count: 1 })
            }
        }
        found
    }

    fn collect(&mut self, schema: &'schema Value, found: &mut Vec<Alternatives<'schema>>) {
        self.visits += 1;
        let Value::Object(keywords) = schema else { return };
        // The library rejects a schema that is part of itself.
        if self.visits > MAX_VISITS || !self.within.insert(ptr::from_ref(schema)) {
            return;
        }
        if keywords.keys().any(|keyword| is_constraint(keyword)) {
            found.push(Alternatives { parts: vec![Part::Own(keywords)], count: 1 });
        }
        for (keyword, value) in keywords {
            match (keyword.as_str(), value) {
                ("const", value) => found.push(Alternatives { parts: vec![Part::Literal(value)], count: 1 }),
                ("enum", Value::Array(values)) => {
                    self.visits += values.len();
                    let parts: Vec<_> = values.iter().map(Part::Literal).collect();
                    found.push(Alternatives { count: parts.len(), parts });
                }
                ("allOf", Value::Array(schemas)) => {
                    schemas.iter().for_each(|schema| self.collect(schema, found));
                }
                ("anyOf" | "oneOf", Value::Array(schemas)) => {
                    found.push(self.alternatives(schemas.iter().map(Constraint::Schema)));
                }
                ("$ref", Value::String(reference)) => {
                    let root = self.root;
                    // Text that may be long is read once, not for each visit.
                    let key = reference.as_ptr();
                    let definition = *self.targets.entry(key).or_insert_with(|| target(root, reference));
                    if let Some(definition) = definition {
                        self.collect(definition, found);
                    }
                }
                _ => {}
            }
        }
        self.within.remove(&ptr::from_ref(schema));
    }

    fn alternatives(
        &mut self,
        constraints: impl IntoIterator<Item = Constraint<'schema>>,
    ) -> Alternatives<'schema> {
        let mut all = Alternatives::default();
        for constraint in constraints {
            all.count = all.count.saturating_add(self.count(constraint));
            let parts = self.conjuncts(constraint).into_iter().flat_map(|alternatives| alternatives.parts);
            all.parts.extend(parts);
        }
        all
    }

    /// Number of alternatives of a constraint.
    fn count(&mut self, constraint: Constraint<'schema>) -> usize {
        let Constraint::Schema(schema) = constraint else { return 1 };
        let key = ptr::from_ref(schema);
        if let Some(&count) = self.counts.get(&key) {
            return count;
        }
        self.counts.insert(key, 1); // for a schema that is part of itself
        let count = product(&self.conjuncts(constraint));
        self.counts.insert(key, count);
        count
    }

    /// Adds the copies of an intersection that takes place `copies` times.
    fn combine(&mut self, conjuncts: Vec<Alternatives<'schema>>, copies: usize) {
        if conjuncts.len() < 2 || self.visits > MAX_VISITS {
            return;
        }
        let copies = copies.saturating_mul(product(&conjuncts)).min(MAX_COMBINATIONS);
        let mut key: Vec<_> =
            conjuncts.iter().flat_map(|alternatives| &alternatives.parts).map(Part::key).collect();
        key.sort_unstable();
        self.visits += key.len();
        let counted = self.combined.entry(key).or_default();
        if *counted >= copies {
            return;
        }
        *counted = copies;
        for Alternatives { parts, count } in &conjuncts {
            // Each alternative is in as many combinations as the other parts have.
            let is_untyped =
                |part: &Part<'_>| matches!(part, Part::Own(keywords) if !keywords.contains_key("type"));
            let types = if parts.iter().any(is_untyped) { TYPES } else { 1 };
            let bytes: usize = parts.iter().map(|part| part.bytes(&self.bytes)).sum();
            let copied = (copies / count.max(&1)).max(1).saturating_mul(bytes * types);
            self.copied_bytes = self.copied_bytes.saturating_add(copied);
        }
        let names = Names::of(&conjuncts);
        self.visits += names.visits;
        self.pairs = self.pairs.saturating_add(names.pairs().saturating_mul(copies));
        let mut properties: HashMap<&str, Vec<Vec<Constraint<'_>>>> = HashMap::new();
        let mut unnamed = vec![Vec::new(); conjuncts.len()];
        let mut items = vec![Vec::new(); conjuncts.len()];
        let mut num_properties = 0;
        for (index, alternatives) in conjuncts.iter().enumerate() {
            for part in &alternatives.parts {
                for (name, constraint) in part.properties() {
                    let by_conjunct =
                        properties.entry(name).or_insert_with(|| vec![Vec::new(); conjuncts.len()]);
                    by_conjunct[index].push(constraint);
                    num_properties += 1;
                }
                unnamed[index].extend(part.unnamed());
                items[index].extend(part.items());
            }
        }
        // Each part is merged with those before it.
        self.pairs = self.pairs.saturating_add(num_properties * conjuncts.len());
        self.visits += num_properties * conjuncts.len();
        for by_conjunct in properties.values_mut() {
            by_conjunct.iter_mut().zip(&unnamed).for_each(|(constraints, others)| constraints.extend(others));
        }
        for by_conjunct in properties.into_values().chain([unnamed, items]) {
            let constrained: Vec<_> =
                by_conjunct.into_iter().filter(|constraints| !constraints.is_empty()).collect();
            if constrained.len() > 1 {
                let mut inner = Vec::new();
                for constraints in constrained {
                    match constraints[..] {
                        [constraint] => inner.extend(self.conjuncts(constraint)),
                        _ => inner.push(self.alternatives(constraints)),
                    }
                }
                self.combine(inner, copies);
            }
        }
    }

    /// Adds the pairs that are compared to find out whether alternatives exclude each other: by type, or by a property
    /// that is required.
    fn exclude(&mut self, schemas: &'schema [Value]) {
        let Alternatives { parts, count } = self.alternatives(schemas.iter().map(Constraint::Schema));
        let required: HashSet<&str> = parts.iter().flat_map(Part::required).collect();
        let mut compared = count.max(parts.len());
        for part in &parts {
            for (_, constraint) in part.properties().filter(|(name, _)| required.contains(name)) {
                compared = compared.saturating_add(self.count(constraint));
            }
        }
        self.visits += compared;
        self.pairs = self.pairs.saturating_add(compared.saturating_mul(compared));
    }
}

/// The names in an object, for the pairs that the library compares.
#[derive(Default)]
pub(super) struct Names {
    /// Properties that are named or required.
    properties: usize,
    patterns: usize,
    /// Whether the object counts its properties.
    is_counted: bool,
    visits: usize,
}

impl Names {
    /// Those of the combination of alternatives with the most names.
    fn of(conjuncts: &[Alternatives<'_>]) -> Self {
        let mut all = Self::default();
        // Alternatives may all have the same names, of which each combination has those of one.
        let mut names: HashSet<&str> = HashSet::new();
        for Alternatives { parts, .. } in conjuncts {
            match &parts[..] {
                [part] => {
                    names.extend(part.names());
                    let own = Self::of_part(part, HashSet::new());
                    all.patterns += own.patterns;
                    all.is_counted |= own.is_counted;
                }
                parts => {
                    let each = parts.iter().map(|part| Self::of_part(part, part.names().collect()));
                    let largest = each.max_by_key(Self::pairs).unwrap_or_default();
                    all.properties += largest.properties;
                    all.patterns += largest.patterns;
                    all.is_counted |= largest.is_counted;
                }
            }
            all.visits += parts.iter().map(|part| part.names().count()).sum::<usize>();
        }
        all.properties += names.len();
        all
    }

    /// Those of the keywords of a schema.
    pub(super) fn of_keywords(keywords: &Map<String, Value>) -> Self {
        let part = Part::Own(keywords);
        Self::of_part(&part, part.names().collect())
    }

    fn of_part(part: &Part<'_>, names: HashSet<&str>) -> Self {
        let mut own = Self { properties: names.len(), ..Self::default() };
        for (keyword, value) in part.keywords() {
            match keyword {
                "patternProperties" => own.patterns = value.as_object().map_or(0, Map::len),
                "minProperties" | "maxProperties" => own.is_counted = true,
                _ => {}
            }
        }
        own
    }

    /// Pairs of properties that the library compares, with measured weights: the cost of one pair, in units of the
    /// cheapest kind.
    pub(super) fn pairs(&self) -> usize {
        let weight = if self.is_counted { 400 } else { 1 };
        let named = square(self.properties).saturating_mul(weight);
        named.saturating_add(square(self.patterns).saturating_mul(1_000))
    }
}

fn square(count: usize) -> usize {
    count.saturating_mul(count)
}

impl<'schema> Part<'schema> {
    /// The properties that are named or required.
    fn names(&self) -> impl Iterator<Item = &'schema str> + use<'schema> {
        self.properties().map(|(name, _)| name).chain(self.required())
    }

    fn keywords(&self) -> impl Iterator<Item = (&'schema str, &'schema Value)> + use<'schema> {
        let keywords = if let Part::Own(keywords) = self { Some(*keywords) } else { None };
        let keywords = keywords.into_iter().flatten().map(|(keyword, value)| (keyword.as_str(), value));
        keywords.filter(|(keyword, _)| is_constraint(keyword))
    }

    fn literal(&self) -> Option<&'schema Value> {
        if let Part::Literal(value) = self { Some(*value) } else { None }
    }

    fn key(&self) -> *const () {
        match self {
            Self::Own(keywords) => ptr::from_ref(*keywords).cast(),
            Self::Literal(value) => ptr::from_ref(*value).cast(),
        }
    }

    fn bytes(&self, bytes: &HashMap<*const Value, usize>) -> usize {
        let of = |value: &Value| bytes[&ptr::from_ref(value)];
        match self {
            Self::Own(_) => self.keywords().map(|(keyword, value)| keyword.len() + of(value)).sum(),
            Self::Literal(value) => of(value),
        }
    }

    fn properties(&self) -> impl Iterator<Item = (&'schema str, Constraint<'schema>)> + use<'schema> {
        let own = self.keywords().filter(|(keyword, _)| *keyword == "properties");
        let own = own.filter_map(|(_, value)| value.as_object()).flatten();
        let literal = self.literal().and_then(Value::as_object);
        let own = own.map(|(name, schema)| (name.as_str(), Constraint::Schema(schema)));
        own.chain(
            literal.into_iter().flatten().map(|(name, value)| (name.as_str(), Constraint::Literal(value))),
        )
    }

    /// The constraints of properties that `properties` does not name.
    fn unnamed(&self) -> impl Iterator<Item = Constraint<'schema>> + use<'schema> {
        self.keywords().flat_map(|(keyword, value)| {
            let schema = (keyword == "additionalProperties").then_some(value);
            let patterns = value.as_object().filter(|_| keyword == "patternProperties");
            schema.into_iter().chain(patterns.into_iter().flat_map(Map::values)).map(Constraint::Schema)
        })
    }

    fn items(&self) -> impl Iterator<Item = Constraint<'schema>> + use<'schema> {
        let literal = self.literal().and_then(Value::as_array);
        let own =
            self.keywords().filter(|(keyword, _)| ITEMS.contains(keyword)).flat_map(
                |(_, value)| match value {
                    Value::Array(schemas) => schemas.as_slice(),
                    schema => std::slice::from_ref(schema),
                },
            );
        own.map(Constraint::Schema).chain(literal.into_iter().flatten().map(Constraint::Literal))
    }

    fn required(&self) -> impl Iterator<Item = &'schema str> + use<'schema> {
        let own = self.keywords().filter(|(keyword, _)| *keyword == "required");
        own.filter_map(|(_, value)| value.as_array()).flatten().filter_map(Value::as_str)
    }
}

fn is_annotation(keyword: &str) -> bool {
    ANNOTATIONS.contains(&keyword)
}

fn is_constraint(keyword: &str) -> bool {
    !COMBINING.contains(&keyword) && !is_annotation(keyword)
}

/// Number of combinations of alternatives.
fn product(conjuncts: &[Alternatives<'_>]) -> usize {
    let counts = conjuncts.iter().map(|alternatives| alternatives.count.max(1));
    counts.fold(1, |product: usize, count| product.saturating_mul(count)).min(MAX_COMBINATIONS)
}
