//! The packed matrices of a model: the parts of each, which have one format, their bytes and their memory.

use std::ops::Range;

use penstock_device::{Allocation, Load, PlannedMatrix};
use penstock_types::WeightFormat;

use crate::blocks::{Fused, layer_of, module_name};
use crate::config::ModelConfig;
use crate::formats::{Residence, WeightFormats, readable_together};
use crate::model::{EMBEDDING, weights_of};

/// Consecutive tensors of a fused matrix that have the same format.
pub(crate) struct Run {
    pub(crate) parts: Range<usize>,
    pub(crate) format: WeightFormat,
}

/// Divides the tensors of a fused matrix.
pub(crate) fn runs<B: Load>(
    backend: &B,
    matrix: &Fused,
    columns: usize,
    formats: &WeightFormats,
) -> Vec<Run> {
    let all = matrix.names.iter().map(|name| formats.of(name)).collect();
    let mut runs: Vec<Run> = Vec::new();
    for (index, format) in readable_together(backend, columns, all).into_iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.format == format => run.parts.end = index + 1,
            _ => runs.push(Run { parts: index..index + 1, format }),
        }
    }
    runs
}

/// The rows and the format of each run.
pub(crate) fn parts(runs: &[Run], rows: &[usize]) -> Vec<(usize, WeightFormat)> {
    runs.iter().map(|run| (rows[run.parts.clone()].iter().sum(), run.format)).collect()
}

/// The bytes of all weights, by the memory that holds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// Bytes in the arena of the device.
    pub arena: u64,
    /// Bytes of mapped files. A page takes memory when it is read.
    pub mapped: u64,
    /// Bytes that are in memory already.
    pub in_memory: u64,
}

impl WeightBytes {
    pub fn total(&self) -> u64 {
        self.arena.saturating_add(self.mapped).saturating_add(self.in_memory)
    }
}

/// The bytes of all weights.
pub fn weight_bytes<B: Load>(backend: &B, config: &ModelConfig, formats: &WeightFormats) -> WeightBytes {
    let mut bytes = WeightBytes::default();
    for weight in weights_of(config) {
        let Some(columns) = weight.columns else {
            bytes.arena += backend.bytes(Allocation::Floats(weight.len()));
            continue;
        };
        let parts = parts(&runs(backend, &weight, columns, formats), &weight.rows);
        let matrix = backend.bytes(Allocation::Matrix { columns, parts: &parts });
        *match formats.residence() {
            Residence::Arena | Residence::Repacked => &mut bytes.arena,
            _ if backend.copies_mapped() => &mut bytes.arena,
            Residence::Mapped => &mut bytes.mapped,
            Residence::Memory => &mut bytes.in_memory,
        } += matrix;
    }
    bytes
}

/// The weight matrices, for the backend.
pub fn planned_matrices<B: Load>(
    backend: &B,
    config: &ModelConfig,
    formats: &WeightFormats,
) -> Vec<PlannedMatrix> {
    let matrices = weights_of(config).into_iter();
    matrices
        .filter_map(|weight| {
            let columns = weight.columns?;
            let parts = parts(&runs(backend, &weight, columns, formats), &weight.rows);
            let is_multiplied = config.tied_head || weight.names != [EMBEDDING];
            Some(PlannedMatrix { columns, parts, is_multiplied })
        })
        .collect()
}

/// The matrices of one module of all layers that have the same format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFormat {
    /// The name of the module, in a layer without the name of the layer.
    pub module: String,
    pub format: WeightFormat,
    pub count: usize,
    /// The bytes of these matrices, without padding.
    pub bytes: u64,
}

/// The formats of the weight matrices, in the order of the modules.
pub fn module_formats<B: Load>(
    backend: &B,
    config: &ModelConfig,
    formats: &WeightFormats,
) -> Vec<ModuleFormat> {
    let mut found: Vec<ModuleFormat> = Vec::new();
    for fused in weights_of(config) {
        let Some(columns) = fused.columns else { continue };
        for Run { parts, format } in runs(backend, &fused, columns, formats) {
            for part in parts {
                let name = module_name(&fused.names[part]);
                let module = layer_of(name).map_or(name, |(_, module)| module);
                let bytes = format.bytes(fused.rows[part], columns) as u64;
                match found.iter_mut().find(|other| other.module == module && other.format == format) {
                    Some(other) => (other.count, other.bytes) = (other.count + 1, other.bytes + bytes),
                    None => found.push(ModuleFormat { module: module.to_owned(), format, count: 1, bytes }),
                }
            }
        }
    }
    let first: Vec<String> = found.iter().map(|found| found.module.clone()).collect();
    found.sort_by_key(|found| first.iter().position(|module| *module == found.module));
    found
}
