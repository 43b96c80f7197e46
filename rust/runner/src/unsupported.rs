//! The parts of a checkpoint that prevent it from being opened, found without loading it.

use penstock_checkpoint::Checkpoint;
use penstock_models::ModelConfig;

/// Messages for an unsupported configuration and for weights in an unsupported type; empty if there are none.
pub fn unsupported(checkpoint: &Checkpoint) -> Vec<String> {
    let config = ModelConfig::from_json(checkpoint.config()).err().map(|error| error.to_string());
    let is_packed = |name: &&str| {
        checkpoint.conversion().is_some_and(|conversion| conversion.matrices.contains_key(*name))
    };
    let names = checkpoint.names().filter(|name| !is_packed(name));
    let mut tensors = names.filter_map(|name| checkpoint.tensor(name).err());
    let first = tensors.next().map(|error| match tensors.count() {
        0 => error.to_string(),
        others => format!("{error} (and {others} more tensors)"),
    });
    config.into_iter().chain(first).collect()
}
