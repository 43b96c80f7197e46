//! The format of each weight matrix in memory.

use std::collections::BTreeMap;

use penstock_checkpoint::{Checkpoint, CheckpointError, Conversion, FusedPart};
use penstock_device::{Load, packed};
use penstock_types::{Activations, Dtype, FieldError, Quantization, WeightFormat, WeightScheme};

use crate::blocks::module_name;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::model::{EMBEDDING, HEAD, matrix_names};

/// The format of each weight matrix, by the name of its tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightFormats {
    default: WeightFormat,
    others: BTreeMap<String, WeightFormat>,
    residence: Residence,
}

/// The memory that holds the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residence {
    /// The matrices are packed into the memory of the backend.
    Arena,
    /// The matrices are used in a mapped file.
    Mapped,
    /// The matrices are used in memory of the caller.
    Memory,
    /// The matrices of a converted model are packed again, because the layout of the backend is another one.
    Repacked,
}

impl WeightFormats {
    /// All matrices in the same format.
    pub fn uniform(format: WeightFormat) -> Self {
        Self { default: format, others: BTreeMap::new(), residence: Residence::Arena }
    }

    /// The formats that `quantization` requests for the matrices of `model`. Matrices that are not quantised have
    /// `dtype`.
    pub fn new<B: Load>(
        backend: &B,
        checkpoint: &Checkpoint,
        model: &ModelConfig,
        dtype: Dtype,
        quantization: &Quantization,
    ) -> Result<Self, ModelError> {
        check_patterns(model, quantization)?;
        check_tables(model, quantization)?;
        if let Some(conversion) = checkpoint.conversion() {
            let formats = Self::as_converted(backend, checkpoint, conversion)?;
            formats.check_request(backend, conversion, model, dtype, quantization)?;
            return Ok(formats);
        }
        let mut others = BTreeMap::new();
        for name in matrix_names(model) {
            let scheme = scheme_of(model, quantization, &name);
            let format = match scheme.weight_type.0 {
                None => stored(backend, checkpoint, &name),
                Some(_) => scheme.grid().map(WeightFormat::Grid),
            };
            others.extend(format.map(|format| (name, format)));
        }
        Ok(Self { others, ..Self::uniform(dtype.into()) })
    }

    /// The formats of a converted model. A format that `backend` cannot use is an error.
    fn as_converted<B: Load>(
        backend: &B,
        checkpoint: &Checkpoint,
        conversion: &Conversion,
    ) -> Result<Self, ModelError> {
        let unsupported = |field: &str, found: String, supported: String| {
            let file = checkpoint.path().to_owned();
            CheckpointError::Unsupported { file, field: field.to_owned(), found, supported }
        };
        let residence = if conversion.layout == backend.packed_layout().name {
            if checkpoint.is_mapped() { Residence::Mapped } else { Residence::Memory }
        } else if conversion.layout == packed::LAYOUT {
            Residence::Repacked
        } else {
            let supported = format!(
                "{}; convert the model again with this version of penstock, or open the original",
                packed::LAYOUT
            );
            return Err(unsupported("layout", format!("{:?}", conversion.layout), supported).into());
        };
        let mut formats = Self { residence, ..Self::uniform(conversion.dtype.into()) };
        for (name, matrix) in &conversion.matrices {
            let own: Vec<_> = matrix.parts.iter().map(|part| part.format).collect();
            let is_supported = own.iter().all(|format| backend.supports(*format, matrix.columns));
            if !is_supported || readable_together(backend, matrix.columns, own.clone()) != own {
                let supported = "formats of this backend that read the same activations".to_owned();
                return Err(unsupported(
                    &format!("matrix {}", name.escape_debug()),
                    format!("{own:?}"),
                    supported,
                )
                .into());
            }
            formats.others.extend(matrix.parts.iter().map(|part| (part.tensor.clone(), part.format)));
        }
        Ok(formats)
    }

    /// Checks that the options request the formats of the conversion, or none.
    fn check_request<B: Load>(
        &self,
        backend: &B,
        conversion: &Conversion,
        model: &ModelConfig,
        dtype: Dtype,
        quantization: &Quantization,
    ) -> Result<(), FieldError> {
        if dtype != conversion.dtype {
            let limit = format!("auto or {}, the type of the converted model", conversion.dtype.name());
            return Err(FieldError::new("dtype", dtype.name(), limit));
        }
        for matrix in conversion.matrices.values() {
            let own: Vec<_> = matrix.parts.iter().map(|part| self.of(&part.tensor)).collect();
            let requested = |part: &FusedPart| {
                let scheme = scheme_of(model, quantization, &part.tensor);
                match scheme.weight_type.0 {
                    None => part.format,
                    Some(_) => scheme.grid().map_or(dtype.into(), WeightFormat::Grid),
                }
            };
            let requested = matrix.parts.iter().map(requested).collect();
            if readable_together(backend, matrix.columns, requested) != own {
                let limit = format!("auto or {}, as the model was converted", conversion.quantization);
                return Err(FieldError::new("quantization", quantization, limit));
            }
        }
        Ok(())
    }

    pub(crate) fn residence(&self) -> Residence {
        self.residence
    }

    /// Whether the formats are fixed by a conversion.
    pub fn are_fixed(&self) -> bool {
        self.residence != Residence::Arena
    }

    /// The same, with another type of the matrices that are not quantised.
    pub fn with_dtype(&self, dtype: Dtype) -> Self {
        Self { default: dtype.into(), ..self.clone() }
    }

    /// The format of a tensor.
    pub fn of(&self, name: &str) -> WeightFormat {
        self.others.get(name).copied().unwrap_or(self.default)
    }
}

/// The formats of the tensors of a fused matrix. All read floats if they read different activations, or if the backend
/// does not support one of them.
pub(crate) fn readable_together<B: Load>(
    backend: &B,
    columns: usize,
    mut formats: Vec<WeightFormat>,
) -> Vec<WeightFormat> {
    let activations = formats.first().map(|format| format.activations());
    let is_readable = |format: &WeightFormat| {
        Some(format.activations()) == activations && backend.supports(*format, columns)
    };
    if !formats.iter().all(is_readable) {
        formats.iter_mut().for_each(|format| *format = format.with_activations(Activations::Float));
    }
    formats
}

/// The format of a quantised tensor in the file, if the backend has it.
fn stored<B: Load>(backend: &B, checkpoint: &Checkpoint, name: &str) -> Option<WeightFormat> {
    let tensor = checkpoint.tensor(name).ok()?;
    let format = tensor.format();
    let is_grid = matches!(format, WeightFormat::Grid(_));
    (is_grid && backend.supports(format, tensor.columns())).then_some(format)
}

/// The scheme of a matrix: the scheme of the table, else of the first pattern that matches, else the default. A table
/// that is also the head has both names.
fn scheme_of(model: &ModelConfig, quantization: &Quantization, name: &str) -> WeightScheme {
    let Quantization { default, embedding, head, layers } = quantization;
    let names = [name, if name == EMBEDDING && model.tied_head { HEAD } else { name }];
    let table = match name {
        EMBEDDING if model.tied_head => embedding.or(*head),
        EMBEDDING => *embedding,
        HEAD => *head,
        _ => None,
    };
    let is_matched = |pattern: &str| names.iter().any(|name| matches(pattern, module_name(name)));
    let matched = || layers.iter().find(|(pattern, _)| is_matched(pattern)).map(|(_, scheme)| *scheme);
    let other = if matches!(name, EMBEDDING | HEAD) { default.of_tables() } else { *default };
    table.or_else(matched).unwrap_or(other)
}

/// A table that is also the head has one format.
fn check_tables(model: &ModelConfig, quantization: &Quantization) -> Result<(), FieldError> {
    match (quantization.embedding, quantization.head) {
        (Some(embedding), Some(head)) if model.tied_head && embedding != head => {
            let limit = "the same for 'embedding' and 'head', which are one matrix in this model";
            Err(FieldError::new("quantization", "{'embedding': ..., 'head': ...}", limit))
        }
        _ => Ok(()),
    }
}

/// Checks that every pattern matches a module, because a misspelt pattern has no effect.
fn check_patterns(model: &ModelConfig, quantization: &Quantization) -> Result<(), FieldError> {
    let names: Vec<String> = matrix_names(model).chain([HEAD.to_owned()]).collect();
    let unused = |(pattern, _): &&(String, _)| !names.iter().any(|name| matches(pattern, module_name(name)));
    let Some((pattern, _)) = quantization.layers.iter().find(unused) else { return Ok(()) };
    let examples: Vec<_> = names.iter().take(8).map(|name| module_name(name)).collect();
    let last = model.num_layers().saturating_sub(1);
    let limit = format!(
        "a mapping with patterns for 'layers' that match modules of the model, such as lm_head, {} or model.layers.{last}",
        examples.join(", ")
    );
    Err(FieldError::new("quantization", format!("{{'layers': {{'{pattern}': ...}}}}"), limit))
}

/// Whether a name matches a pattern. `*` matches any characters, `?` one character.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    // The last star, and the end of the characters that it matches.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, n));
            p += 1;
        } else if pattern.get(p).is_some_and(|byte| *byte == b'?' || *byte == name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((at, end)) = star {
            star = Some((at, end + 1));
            (p, n) = (at + 1, end + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_matches_any_characters_and_question_mark_one() {
        let name = "model.layers.12.mlp.down_proj";
        for pattern in ["*", "*.down_proj", "model.layers.1?.*", "model.layers.12.mlp.down_proj", "*12*mlp*"]
        {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in ["", "down_proj", "*.up_proj", "model.layers.1.*", "model.layers.12", "*?.down_proj?"]
        {
            assert!(!matches(pattern, name), "{pattern}");
        }
        assert!(matches("", "") && matches("**", "") && !matches("?", ""));
    }
}
