//! Adapters: the updates of an adapter's modules as updates of the fused matrices of a decoder.

use penstock_checkpoint::{AdapterFiles, AdapterModule, Tensor};
use penstock_device::AdapterLayout;
use penstock_types::{Dtype, LowRankShape, LowRankUpdate, PackedAdapter, WeightFormat};

use crate::config::ModelConfig;
use crate::decoder::Product;
use crate::error::ModelError;
use crate::fused::{DOWN, FUSED_GATE_UP, FUSED_QKV, OUTPUT};
use crate::weights::ProgressCallback;

/// A module of a layer: the rows of the product that it is, and its columns.
struct Target {
    name: &'static str,
    product: Product,
    first_row: usize,
    rows: usize,
    columns: usize,
}

/// The modules of a layer, in the order of products and rows.
fn targets(config: &ModelConfig) -> Vec<Target> {
    let (hidden, heads, wide) = (config.hidden_size, config.heads, config.intermediate_size);
    let (query, kv) = (heads.query_width(), heads.kv_width());
    let products: [(Product, &[&'static str], &[usize], usize); 4] = [
        (Product::Qkv, &FUSED_QKV, &[query, kv, kv], hidden),
        (Product::Output, &[OUTPUT], &[hidden], query),
        (Product::GateUp, &FUSED_GATE_UP, &[wide, wide], hidden),
        (Product::Down, &[DOWN], &[hidden], wide),
    ];
    let mut found = Vec::new();
    for (product, names, rows, columns) in products {
        let mut first_row = 0;
        for (name, rows) in names.iter().zip(rows) {
            found.push(Target { name, product, first_row, rows: *rows, columns });
            first_row += rows;
        }
    }
    found
}

/// The number of matrices that adapters can update.
pub fn adapted_matrices(config: &ModelConfig) -> usize {
    Product::COUNT * config.num_layers()
}

/// Bytes that an adapter of all linear layers with updates of this rank and type takes on the device.
pub fn adapter_bytes<L: AdapterLayout>(config: &ModelConfig, rank: usize, dtype: Dtype) -> u64 {
    let bytes = |target: &Target| {
        let shape = LowRankShape { rows: target.rows, columns: target.columns, rank, dtype };
        L::update_bytes(&shape) as u64
    };
    L::adapter_bytes(config.num_layers() as u64 * targets(config).iter().map(bytes).sum::<u64>())
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
    let mut modules = Vec::new();
    for module in files.modules() {
        let (layer, index) = position(config, &targets, module.name)?;
        check(&module, &targets[index], limits.rank)?;
        modules.push((layer, index, module));
    }
    modules.sort_unstable_by_key(|(layer, index, _)| (*layer, *index));
    let (mut updates, mut size) = (Vec::with_capacity(modules.len()), 0);
    for (layer, index, module) in &modules {
        let target = &targets[*index];
        let shape = LowRankShape {
            rows: target.rows,
            columns: target.columns,
            rank: module.rank(),
            dtype: widest(&module.a, &module.b),
        };
        let (matrix, first_row) = (target.product.matrix(*layer), target.first_row);
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
    for (index, (_, _, module)) in modules.iter().enumerate() {
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

/// The layer of a module, and its index among the targets.
fn position(config: &ModelConfig, targets: &[Target], name: &str) -> Result<(usize, usize), ModelError> {
    let names = || targets.iter().map(|target| target.name).collect::<Vec<_>>().join(", ");
    let refused = |problem: String| Err(ModelError::Adapter { module: name.to_owned(), problem });
    let Some((layer, module)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
    else {
        return refused(format!(
            "is not supported; the modules that can be adapted are {} of each layer",
            names()
        ));
    };
    let Some(index) = targets.iter().position(|target| target.name == module) else {
        return refused(format!("is not a module of the model that can be adapted; these are {}", names()));
    };
    // "00" and "+0" are not names of a layer.
    match layer.parse::<usize>() {
        Ok(number) if number < config.num_layers() && number.to_string() == layer => Ok((number, index)),
        _ => refused(format!("is not in the model, which has {} layers", config.num_layers())),
    }
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
