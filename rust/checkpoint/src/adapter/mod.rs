//! Reader of LoRA adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The tensors decide which modules are adapted. An adapter that alters the base model, or has other parts than the
//! matrices A and B of linear layers, is refused by name, as is a tensor that is not one of these.

mod config;
mod names;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use config::AdapterConfig;
use names::{Part, TensorName, parse};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::{CheckpointError, shown};
use crate::json;
use crate::mapped::MappedFile;
use crate::safetensors::{self, HeaderBytes};
use crate::tensor::{Tensor, TensorEntry};

const WEIGHTS: &str = "adapter_model.safetensors";
/// The most modules of an adapter: more than any supported model has.
const MAX_MODULES: usize = 4096;
/// The expressions of a configuration are searched in each name.
const MAX_NAME_BYTES: usize = 1024;
/// Names under which adapters are published that are not read.
const SHARD_INDEXES: [&str; 2] = ["model.safetensors.index.json", "adapter_model.safetensors.index.json"];
const PICKLED: &str = "adapter_model.bin";

/// An adapter. Its files are read whole, so that another process cannot change them afterwards.
pub struct AdapterFiles {
    path: PathBuf,
    base_model: Option<String>,
    version: u64,
    file: MappedFile,
    modules: BTreeMap<String, Module>,
}

/// The names and entries of A and B, and the scale of their product.
struct Module {
    a: (String, TensorEntry),
    b: (String, TensorEntry),
    scale: f32,
}

/// A and B of a module, as far as they were found.
type Pair = [Option<(String, TensorEntry)>; 2];

/// The update of one linear layer: `scale * B A`.
pub struct AdapterModule<'a> {
    /// The name of the layer in the base model, such as `model.layers.0.self_attn.q_proj`.
    pub name: &'a str,
    /// `[rank, input features]`.
    pub a: Tensor<'a>,
    /// `[output features, rank]`.
    pub b: Tensor<'a>,
    pub scale: f32,
}

impl AdapterModule<'_> {
    /// The rank of the update.
    pub fn rank(&self) -> usize {
        self.a.rows()
    }
}

impl AdapterFiles {
    /// Reads a directory with at most this many bytes of weights, and checks the configuration and the shapes of A and
    /// B against each other.
    pub fn open(path: &Path, max_bytes: u64) -> Result<Self, CheckpointError> {
        let config = AdapterConfig::read(path)?;
        let file = read_weights(path, max_bytes)?;
        let mut pairs: BTreeMap<String, (String, Pair)> = BTreeMap::new();
        for (name, entry) in safetensors::tensors(&file, 0, &mut HeaderBytes::default())? {
            let malformed = |problem: &str| {
                CheckpointError::malformed(file.path(), format!("tensor {}", shown(&name)), problem)
            };
            if name.len() > MAX_NAME_BYTES {
                let problem = format!("has a name of {} bytes; the limit is {MAX_NAME_BYTES}", name.len());
                return Err(malformed(&problem));
            }
            let TensorName { module, wrapped, part } = parse(&name).map_err(&malformed)?;
            let (other, pair) = pairs.entry(module).or_insert_with(|| (wrapped.clone(), [None, None]));
            let place = &mut pair[match part {
                Part::A => 0,
                Part::B => 1,
            }];
            if place.is_some() || *other != wrapped {
                return Err(malformed("is a second tensor for the same part of a module"));
            }
            *place = Some((name, entry));
        }
        if pairs.is_empty() {
            return Err(CheckpointError::malformed(file.path(), "tensors", "there are none"));
        }
        if pairs.len() > MAX_MODULES {
            let problem = format!("of {} modules; the limit is {MAX_MODULES}", pairs.len());
            return Err(CheckpointError::malformed(file.path(), "tensors", problem));
        }
        config.check_steps(pairs.values().map(|(wrapped, _)| wrapped.len()))?;
        let modules = pairs.into_iter().map(|(name, (wrapped, pair))| {
            let module = Module::new(&file, &wrapped, pair, &config)?;
            Ok((name, module))
        });
        let modules = modules.collect::<Result<_, CheckpointError>>()?;
        let version = xxh3_64_with_seed(file.bytes(), config.hash);
        let base_model = config.base_model;
        Ok(Self { path: path.to_owned(), base_model, version, file, modules })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A hash of the contents.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The model for which the adapter was trained, as the configuration names it.
    pub fn base_model(&self) -> Option<&str> {
        self.base_model.as_deref()
    }

    /// The updates, in the order of their names.
    pub fn modules(&self) -> impl Iterator<Item = AdapterModule<'_>> {
        self.modules.iter().map(|(name, Module { a, b, scale })| AdapterModule {
            name,
            a: self.tensor(a),
            b: self.tensor(b),
            scale: *scale,
        })
    }

    fn tensor<'a>(&'a self, (name, entry): &'a (String, TensorEntry)) -> Tensor<'a> {
        // `Module::new` has checked the type.
        Tensor::new(name, entry, std::slice::from_ref(&self.file)).expect("a tensor of floats; this is a bug")
    }
}

impl Module {
    fn new(
        file: &MappedFile,
        name: &str,
        pair: Pair,
        config: &AdapterConfig,
    ) -> Result<Self, CheckpointError> {
        let malformed =
            |field: String, problem: String| Err(CheckpointError::malformed(file.path(), field, problem));
        let (a, b) = match pair {
            [Some(a), Some(b)] => (a, b),
            [first, _] => {
                let missing = if first.is_none() { "lora_A" } else { "lora_B" };
                return malformed(format!("module {}", shown(name)), format!("there is no tensor {missing}"));
            }
        };
        for (tensor, entry) in [&a, &b] {
            let field = || format!("tensor {}", shown(tensor));
            if entry.shape.len() != 2 || entry.shape.contains(&0) {
                return malformed(field(), format!("shape {:?}; a matrix is expected", entry.shape));
            }
            if entry.stored.plain().is_none() {
                let found = entry.stored.to_string();
                return Err(CheckpointError::unsupported(file.path(), field(), found, "F32, F16, BF16, F64"));
            }
        }
        let (rank, found) = (a.1.shape[0], b.1.shape[1]);
        if rank != found {
            let problem = format!("shape {:?}; [_, {rank}] is expected, the rank of lora_A", b.1.shape);
            return malformed(format!("tensor {}", shown(&b.0)), problem);
        }
        let (expected, scale) = config.rank_and_scale(name);
        if rank != expected {
            let problem = format!("rank {rank}; the configuration has {expected}");
            return malformed(format!("tensor {}", shown(&a.0)), problem);
        }
        Ok(Self { a, b, scale })
    }
}

/// The weights of a directory.
fn read_weights(path: &Path, max_bytes: u64) -> Result<MappedFile, CheckpointError> {
    let weights = path.join(WEIGHTS);
    if let Ok(metadata) = weights.metadata()
        && metadata.len() > max_bytes
    {
        let problem = format!("{} bytes; adapter_cache_bytes has room for {max_bytes}", metadata.len());
        return Err(CheckpointError::malformed(&weights, "size", problem));
    }
    if let Some(bytes) = json::read(&weights, max_bytes)? {
        return Ok(MappedFile::in_memory(&weights, bytes.into()));
    }
    let reason = if SHARD_INDEXES.iter().any(|name| path.join(name).exists()) {
        format!(
            "contains no {WEIGHTS}; adapters in several files are not supported: save it with PEFT's save_pretrained"
        )
    } else if path.join(PICKLED).exists() {
        format!(
            "contains no {WEIGHTS}, only {PICKLED}: pickled weights can execute code and are not supported; save it with \
             safe_serialization=True"
        )
    } else {
        format!("contains no {WEIGHTS}")
    };
    Err(CheckpointError::not_a_model(path, reason))
}
