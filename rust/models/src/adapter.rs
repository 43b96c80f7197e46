//! Adapters: the updates of an adapter's modules as updates of the fused matrices of a decoder.

use std::collections::HashMap;

use penstock_checkpoint::{AdapterFiles, AdapterModule, Tensor};
use penstock_device::AdapterLayout;
use penstock_types::{Dtype, LowRankShape, LowRankUpdate, PackedAdapter, WeightFormat};

use crate::blocks::{Fused, layer_of, module_name};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::model::weights_of;
use crate::weights::ProgressCallback;

/// A module that an adapter can update: the rows of the matrix that it is, and its columns.
struct Target {
    name: String,
    matrix: u32,
    first_row: usize,
    rows: usize,
    columns: usize,
}

/// The modules of a model that adapters can update, in the order of matrices and rows.
fn targets(config: &ModelConfig) -> Vec<Target> {
    let mut found = Vec::new();
    for Fused { names, rows, columns, number } in weights_of(config) {
        let (Some(columns), Some(matrix)) = (columns, number) else { continue };
        let mut first_row = 0;
        for (name, rows) in names.iter().zip(rows) {
            found.push(Target { name: module_name(name).to_owned(), matrix, first_row, rows, columns });
            first_row += rows;
        }
    }
    found
}

/// The number of matrices that adapters can update.
pub fn adapted_matrices(config: &ModelConfig) -> usize {
    weights_of(config).iter().filter(|fused| fused.number.is_some()).count()
}

/// Bytes that an adapter of all linear layers with updates of this rank and type takes on the device.
pub fn adapter_bytes<L: AdapterLayout>(config: &ModelConfig, rank: usize, dtype: Dtype) -> u64 {
    let bytes = |target: &Target| {
        let shape = LowRankShape { rows: target.rows, columns: target.columns, rank, dtype };
        L::update_bytes(&shape) as u64
    };
    L::adapter_bytes(targets(config).iter().map(bytes).sum::<u64>())
}

/// The limits of an adapter.
#[derive(Clone, Copy, Debug)]
pub struct AdapterLimits {
    /// The highest rank.
    pub rank: usize,
    /// Bytes on the device.
    pub bytes: u64,
}

/// Checks an adapter against the configuration of the model and packs it for a device.
pub fn pack_adapter<L: AdapterLayout>(
    files: &AdapterFiles,
    config: &ModelConfig,
    limits: AdapterLimits,
    progress: ProgressCallback<'_>,
) -> Result<PackedAdapter, ModelError> {
    let targets = targets(config);
    let by_name: HashMap<&str, usize> = targets.iter().map(|target| &*target.name).zip(0..).collect();
    let mut modules = Vec::new();
    for module in files.modules() {
        let index = *by_name.get(module.name).ok_or_else(|| no_target(config, &targets, module.name))?;
        check(&module, &targets[index], limits.rank)?;
        modules.push((index, module));
    }
    modules.sort_unstable_by_key(|(index, _)| *index);
    let (mut updates, mut size) = (Vec::with_capacity(modules.len()), 0);
    for (index, module) in &modules {
        let target = &targets[*index];
        let shape = LowRankShape {
            rows: target.rows,
            columns: target.columns,
            rank: module.rank(),
            dtype: widest(&module.a, &module.b),
        };
        let (matrix, first_row) = (target.matrix, target.first_row);
        updates.push(LowRankUpdate { matrix, first_row, shape, scale: module.scale, offset: size });
        size += L::update_bytes(&shape);
    }
    let bytes = L::adapter_bytes(size as u64);
    if bytes > limits.bytes {
        return Err(ModelError::AdapterSize { bytes, limit: limits.bytes });
    }
    let refused = |_| ModelError::AdapterMemory { bytes: size };
    let mut packed = PackedAdapter::new(updates, size).map_err(refused)?;
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for (index, (_, module)) in modules.iter().enumerate() {
        let update = packed.updates[index];
        if progress(update.offset as u64, size as u64).is_break() {
            return Err(ModelError::Cancelled);
        }
        let largest = (read_values(&module.a, &mut a)?, read_values(&module.b, &mut b)?);
        check_size(module, largest)?;
        let out = &mut packed.bytes_mut()[update.offset..][..L::update_bytes(&update.shape)];
        L::pack(&update.shape, &a, &b, out);
    }
    if progress(size as u64, size as u64).is_break() {
        return Err(ModelError::Cancelled);
    }
    Ok(packed)
}

/// The error for a module that is no target.
fn no_target(config: &ModelConfig, targets: &[Target], name: &str) -> ModelError {
    let mut modules: Vec<&str> = Vec::new();
    for (_, module) in targets.iter().filter_map(|target| layer_of(&target.name)) {
        if !modules.contains(&module) {
            modules.push(module);
        }
    }
    let problem = match layer_of(name) {
        None => format!(
            "is not supported; the modules that can be adapted are {} of each layer",
            modules.join(", ")
        ),
        Some((_, module)) if !modules.contains(&module) => {
            format!("is not a module of the model that can be adapted; these are {}", modules.join(", "))
        }
        // "00" and "+0" are not names of a layer.
        Some(_) => format!("is not in the model, which has {} layers", config.num_layers()),
    };
    ModelError::Adapter { module: name.to_owned(), problem }
}

fn check(module: &AdapterModule<'_>, target: &Target, max_rank: usize) -> Result<(), ModelError> {
    let rank = module.rank();
    for (tensor, expected) in [(&module.a, [rank, target.columns]), (&module.b, [target.rows, rank])] {
        if tensor.shape() != expected {
            let (tensor, found) = (tensor.name().to_owned(), tensor.shape().to_vec());
            return Err(ModelError::Shape { tensor, found, expected: expected.to_vec() });
        }
    }
    if rank > max_rank {
        let problem = format!("has rank {rank}; max_adapter_rank is {max_rank}");
        return Err(ModelError::Adapter { module: module.name.to_owned(), problem });
    }
    Ok(())
}

/// A type that holds the values of both tensors exactly.
fn widest(a: &Tensor<'_>, b: &Tensor<'_>) -> Dtype {
    match (a.format(), b.format()) {
        (WeightFormat::Float(a), WeightFormat::Float(b)) if a == b => a,
        _ => Dtype::F32,
    }
}

/// The largest entry of an update, with a square in the range of float32: norms square the outputs of layers.
const MAX_ENTRY: f64 = 1e19;

/// Checks that the values of `scale * A`, and the entries that `scale * B A` can have with values as large as these,
/// are at most [`MAX_ENTRY`].
fn check_size(module: &AdapterModule<'_>, (a, b): (f32, f32)) -> Result<(), ModelError> {
    let (a, b, scale) = (f64::from(a), f64::from(b), f64::from(module.scale).abs());
    let scaled = a * scale.max(1.0);
    if scaled.max(scaled * b * module.rank() as f64) <= MAX_ENTRY {
        return Ok(());
    }
    let problem = format!(
        "is too large to compute with: its scale is {scale:e}, the largest values are {a:e} in lora_A and {b:e} in lora_B"
    );
    Err(ModelError::Adapter { module: module.name.to_owned(), problem })
}

/// Reads the values of a tensor, which must be finite. Returns the largest magnitude.
fn read_values(tensor: &Tensor<'_>, values: &mut Vec<f32>) -> Result<f32, ModelError> {
    values.resize(tensor.rows() * tensor.columns(), 0.0);
    tensor.read_rows(0..tensor.rows(), values);
    // Without an early end, so that it is vectorised. Of magnitudes the bits are in the order of the values.
    let largest = values.iter().fold(0, |largest, value| value.abs().to_bits().max(largest));
    if f32::from_bits(largest).is_finite() {
        return Ok(f32::from_bits(largest));
    }
    let value = values.iter().find(|value| !value.is_finite()).unwrap_or(&f32::NAN);
    let (module, problem) = (tensor.name().to_owned(), format!("has the value {value}"));
    Err(ModelError::Adapter { module, problem })
}
