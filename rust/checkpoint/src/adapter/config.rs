//! `adapter_config.json`: ranks and scales, and the fields that are refused.
//!
//! PEFT's rules (its `lora/config.py` and `lora/layer.py`): the scale is `alpha / r`, or `alpha / sqrt(r)` with
//! `use_rslora`; a pattern replaces the value for the modules that match `^(.*\.)?(KEY)$`, the first in the order of
//! the file.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use regex_automata::meta::{BuildError, Regex};
use regex_automata::util::syntax;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{CheckpointError, shown};
use crate::json::{self, CONFIG_LIMIT, JsonObject};

const FILE: &str = "adapter_config.json";
const MAX_RANK: u64 = 1 << 16;
const MAX_PATTERNS: usize = 4096;
/// The most bytes of all compiled expressions of a field. The time of a match is proportional to it.
const EXPRESSIONS_LIMIT: usize = 1 << 16;
/// The most steps of the search for the keys of patterns in the names of all modules: about a second. An adapter with
/// expressions of 20 KiB for a thousand modules takes a tenth of that.
const MAX_STEPS: u64 = 1 << 34;
/// Steps for each byte of a key that is a name.
const NAME_STEPS: u64 = 8;
/// PEFT's default of `r` and `lora_alpha`.
const DEFAULT: u32 = 8;

/// Fields that describe the training or the file, or select modules, which the tensors do.
const INERT: [&str; 29] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_specific_params",
    "task_type",
    "tokenizer_class",
    "use_rslora",
];
/// Fields that alter the base model or the update. Empty values have no effect.
const ALTERING: [&str; 15] = [
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
];
/// The initialisations that leave the base weights as they are.
const INITIALISATIONS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// The ranks and scales of an adapter.
pub(super) struct AdapterConfig {
    path: PathBuf,
    pub base_model: Option<String>,
    /// A hash of the file.
    pub hash: u64,
    rank: usize,
    alpha: f64,
    is_rank_stabilised: bool,
    ranks: Vec<(Key, usize)>,
    alphas: Vec<(Key, f64)>,
}

/// The modules that an entry of a pattern applies to.
enum Key {
    /// The modules with this name, or with a name that ends with a dot and this; a dot in it is any character.
    Name(String),
    /// The modules with a name that matches.
    Expression(Regex),
}

impl Key {
    /// Most keys are names, so that they are not compiled.
    fn new(key: String, limit: usize) -> Result<Self, Box<BuildError>> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_.".contains(&byte);
        if !key.is_empty() && key.bytes().all(is_name) {
            return Ok(Self::Name(key));
        }
        // Names of modules are ASCII.
        let syntax = syntax::Config::new().unicode(false).utf8(false);
        let config = Regex::config().nfa_size_limit(Some(limit)).onepass(false).hybrid(false);
        let builder =
            Regex::builder().configure(config).syntax(syntax).build(&format!(r"^(?:.*\.)?(?:{key})$"));
        Ok(Self::Expression(builder.map_err(Box::new)?))
    }

    fn memory_usage(&self) -> usize {
        match self {
            Self::Name(_) => 0,
            Self::Expression(expression) => expression.memory_usage(),
        }
    }

    /// The steps of a search in a name of this length at most.
    fn steps(&self, length: usize) -> u64 {
        match self {
            Self::Name(name) => NAME_STEPS * (1 + name.len().min(length) as u64),
            Self::Expression(expression) => (expression.memory_usage() as u64).saturating_mul(length as u64),
        }
    }

    fn matches(&self, module: &str) -> bool {
        let name = match self {
            Self::Name(name) => name.as_bytes(),
            Self::Expression(expression) => return expression.is_match(module),
        };
        let Some(start) = module.len().checked_sub(name.len()) else { return false };
        let (before, rest) = module.as_bytes().split_at(start);
        let is_equal = |(key, byte): (&u8, &u8)| key == byte || *key == b'.';
        before.last().is_none_or(|byte| *byte == b'.') && name.iter().zip(rest).all(is_equal)
    }
}

impl AdapterConfig {
    /// Reads the file of a directory.
    pub(super) fn read(directory: &Path) -> Result<Self, CheckpointError> {
        let path = directory.join(FILE);
        let Some(bytes) = json::read(&path, CONFIG_LIMIT)? else {
            return Err(CheckpointError::not_a_model(directory, format!("contains no {FILE}")));
        };
        let fields = json::parse_object(&path, &bytes)?;
        let Patterns { rank_pattern, alpha_pattern } = json::parse_object(&path, &bytes)?;
        let object = JsonObject { path, fields };
        refuse(&object)?;
        let reader = Reader(object);
        let rank = reader.rank("r", reader.0.get("r"))?;
        let alpha = reader.alpha("lora_alpha", reader.0.get("lora_alpha"))?;
        let ranks =
            reader.patterns("rank_pattern", rank_pattern, |name, value| reader.rank(name, Some(value)))?;
        let alphas =
            reader.patterns("alpha_pattern", alpha_pattern, |name, value| reader.alpha(name, Some(value)))?;
        let is_rank_stabilised = reader.0.bool("use_rslora")?.unwrap_or(false);
        let base_model = reader.0.get("base_model_name_or_path").and_then(Value::as_str);
        let base_model = base_model.map(shown);
        let hash = xxh3_64(&bytes);
        let path = reader.0.path;
        Ok(Self { path, base_model, hash, rank, alpha, is_rank_stabilised, ranks, alphas })
    }

    /// Checks that the keys of the patterns can be searched in names of these lengths within [`MAX_STEPS`].
    pub(super) fn check_steps(&self, lengths: impl Iterator<Item = usize>) -> Result<(), CheckpointError> {
        let ranks = self.ranks.iter().map(|(key, _)| key);
        let keys: Vec<&Key> = ranks.chain(self.alphas.iter().map(|(key, _)| key)).collect();
        let mut total = 0_u64;
        for length in lengths {
            for key in &keys {
                total = total.saturating_add(key.steps(length));
            }
            if total > MAX_STEPS {
                let problem = format!(
                    "the patterns take more than {MAX_STEPS} steps for the names of all modules, which is the limit"
                );
                return Err(CheckpointError::malformed(&self.path, "rank_pattern, alpha_pattern", problem));
            }
        }
        Ok(())
    }

    /// The rank and the scale of a module's update.
    pub(super) fn rank_and_scale(&self, module: &str) -> (usize, f32) {
        let rank = first_match(&self.ranks, module).unwrap_or(self.rank);
        let alpha = first_match(&self.alphas, module).unwrap_or(self.alpha);
        let divisor = if self.is_rank_stabilised { (rank as f64).sqrt() } else { rank as f64 };
        (rank, (alpha / divisor) as f32)
    }
}

fn first_match<T: Copy>(patterns: &[(Key, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(key, _)| key.matches(module)).map(|(_, value)| *value)
}

/// Refuses the fields that alter the base model or are not LoRA, and warns of unknown fields that are set.
fn refuse(config: &JsonObject) -> Result<(), CheckpointError> {
    let unsupported = |field: &str, value: &Value, supported: &str| {
        let found = shown(&value.to_string());
        Err(CheckpointError::unsupported(&config.path, shown(field), found, supported))
    };
    match config.get("peft_type") {
        None => {}
        Some(Value::String(kind)) if kind == "LORA" => {}
        Some(kind) => return unsupported("peft_type", kind, "\"LORA\""),
    }
    match config.get("bias") {
        None => {}
        Some(Value::String(bias)) if bias == "none" => {}
        Some(bias) => return unsupported("bias", bias, "\"none\""),
    }
    match config.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => {}
        Some(Value::String(name)) if INITIALISATIONS.contains(&name.as_str()) => {}
        Some(name) => {
            let supported =
                "true, false, \"gaussian\", \"eva\" and \"orthogonal\"; the others alter the base weights";
            return unsupported("init_lora_weights", name, supported);
        }
    }
    for (field, value) in &config.fields {
        let is_set = match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            Value::String(text) => !text.is_empty(),
            Value::Bool(true) | Value::Number(_) => true,
        };
        if is_set && ALTERING.contains(&field.as_str()) {
            return unsupported(field, value, "null, false or empty");
        }
        if is_set && !INERT.contains(&field.as_str()) {
            log::warn!("{}: the field {} is unknown and ignored", config.path.display(), shown(field));
        }
    }
    Ok(())
}

struct Reader(JsonObject);

impl Reader {
    fn path(&self) -> &PathBuf {
        &self.0.path
    }

    fn malformed<T>(&self, field: &str, value: &Value, expected: &str) -> Result<T, CheckpointError> {
        let problem = format!("{}; {expected} is expected", shown(&value.to_string()));
        Err(CheckpointError::malformed(self.path(), shown(field), problem))
    }

    fn rank(&self, field: &str, value: Option<&Value>) -> Result<usize, CheckpointError> {
        let Some(value) = value else { return Ok(DEFAULT as usize) };
        match value.as_u64() {
            Some(rank @ 1..=MAX_RANK) => Ok(rank as usize),
            _ => self.malformed(field, value, &format!("an integer from 1 to {MAX_RANK}")),
        }
    }

    fn alpha(&self, field: &str, value: Option<&Value>) -> Result<f64, CheckpointError> {
        let Some(value) = value else { return Ok(f64::from(DEFAULT)) };
        match value.as_f64() {
            Some(alpha) if alpha.is_finite() && alpha.abs() <= f64::from(f32::MAX) => Ok(alpha),
            _ => self.malformed(field, value, "a finite number of 32 bits"),
        }
    }

    /// The patterns of a field, compiled. The engine of the expressions is linear in the length of a name.
    fn patterns<T>(
        &self,
        field: &str,
        Pattern(entries): Pattern,
        read: impl Fn(&str, &Value) -> Result<T, CheckpointError>,
    ) -> Result<Vec<(Key, T)>, CheckpointError> {
        let mut left = EXPRESSIONS_LIMIT;
        let compiled = entries.into_iter().map(|(key, value)| {
            let name = format!("{field}.{}", shown(&key));
            let refused = |found: &str| {
                let supported = format!(
                    "regular expressions without look-around and references, of at most {EXPRESSIONS_LIMIT} bytes together"
                );
                CheckpointError::unsupported(self.path(), name.clone(), shown(found), supported)
            };
            let key = Key::new(key, left).map_err(|error| refused(&error.to_string()))?;
            left = left.checked_sub(key.memory_usage()).ok_or_else(|| refused("too many expressions"))?;
            Ok((key, read(&name, &value)?))
        });
        compiled.collect()
    }
}

/// The fields with an order.
#[derive(serde::Deserialize)]
struct Patterns {
    #[serde(default)]
    rank_pattern: Pattern,
    #[serde(default)]
    alpha_pattern: Pattern,
}

/// The entries of an object, in the order of the file; none if it is null.
#[derive(Default)]
struct Pattern(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Pattern;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of patterns")
            }

            fn visit_unit<E>(self) -> Result<Pattern, E> {
                Ok(Pattern::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pattern, A::Error> {
                let mut entries: Vec<(String, Value)> = Vec::new();
                let mut indices: HashMap<String, usize> = HashMap::new();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    // As in Python, the last value of a repeated key takes the place of the first.
                    match indices.get(&key) {
                        Some(&index) => entries[index].1 = value,
                        None if entries.len() == MAX_PATTERNS => {
                            let problem = format_args!("more than {MAX_PATTERNS} patterns");
                            return Err(de::Error::custom(problem));
                        }
                        None => {
                            indices.insert(key.clone(), entries.len());
                            entries.push((key, value));
                        }
                    }
                }
                Ok(Pattern(entries))
            }
        }
        deserializer.deserialize_any(Entries)
    }
}
