//! The tensors of a checkpoint while the parts of quantised matrices are collected.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::error::{CheckpointError, shown};
use crate::mapped::MappedFile;
use crate::packed::{CodeOrder, Codes, Location, PackedMatrix};
use crate::tensor::{RowOrder, StoredType, TensorEntry};

pub(super) struct Parts<'a> {
    directory: &'a Path,
    files: &'a [MappedFile],
    tensors: BTreeMap<String, TensorEntry>,
    found: usize,
}

/// A part of a quantised matrix, taken from the tensors.
pub(super) struct Part<'a> {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) stored: StoredType,
    pub(super) at: Location,
    files: &'a [MappedFile],
}

impl<'a> Part<'a> {
    pub(super) fn malformed(&self, problem: impl Into<String>) -> CheckpointError {
        let file = self.files[self.at.file].path();
        CheckpointError::malformed(file, format!("tensor {}", shown(&self.name)), problem)
    }

    pub(super) fn unsupported(&self, found: impl Into<String>, supported: &str) -> CheckpointError {
        let file = self.files[self.at.file].path();
        CheckpointError::unsupported(file, format!("tensor {}", shown(&self.name)), found, supported)
    }

    pub(super) fn bytes(&self) -> &'a [u8] {
        self.at.bytes(self.files)
    }

    pub(super) fn is(&self, dtype: &str) -> bool {
        matches!(self.stored, StoredType::Other(name) if name == dtype)
    }

    /// The elements of a vector of integers.
    pub(super) fn integers(&self) -> Result<Vec<i64>, CheckpointError> {
        let bytes = self.bytes();
        match self.stored {
            StoredType::Other("I32") => {
                Ok(bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word).into()).collect())
            }
            StoredType::Other("I64") => {
                Ok(bytes.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect())
            }
            _ => Err(self.unsupported(self.stored.to_string(), "I32, I64")),
        }
    }

    /// The sizes of a matrix of 32-bit words. Both are positive.
    pub(super) fn words(&self) -> Result<[usize; 2], CheckpointError> {
        if !self.is("I32") {
            return Err(self.unsupported(self.stored.to_string(), "I32"));
        }
        self.matrix()
    }

    /// The sizes of a matrix. Both are positive.
    pub(super) fn matrix(&self) -> Result<[usize; 2], CheckpointError> {
        match self.shape[..] {
            [rows, columns] if rows > 0 && columns > 0 => Ok([rows, columns]),
            _ => Err(self.malformed(format!("shape {:?}; two positive dimensions are expected", self.shape))),
        }
    }

    pub(super) fn expect_shape(&self, expected: &[usize], reason: &str) -> Result<(), CheckpointError> {
        if self.shape == expected {
            return Ok(());
        }
        Err(self.malformed(format!("shape {:?}; {expected:?} is expected for {reason}", self.shape)))
    }

    pub(super) fn codes(&self, order: CodeOrder) -> Codes {
        Codes { at: self.at.clone(), order }
    }
}

impl<'a> Parts<'a> {
    pub(super) fn new(
        directory: &'a Path,
        files: &'a [MappedFile],
        tensors: BTreeMap<String, TensorEntry>,
    ) -> Self {
        Parts { directory, files, tensors, found: 0 }
    }

    /// The names of all modules that have a tensor of one of these names.
    pub(super) fn modules(&self, suffixes: &[&str]) -> BTreeSet<String> {
        let module = |name: &String| {
            let (module, suffix) = name.rsplit_once('.')?;
            suffixes.contains(&suffix).then(|| module.to_owned())
        };
        self.tensors.keys().filter_map(module).collect()
    }

    /// The names of all modules whose weight has this dtype.
    pub(super) fn modules_of(&self, dtype: &str) -> Vec<String> {
        let module = |(name, entry): (&String, &TensorEntry)| match entry.stored {
            StoredType::Other(found) if found == dtype => name.strip_suffix(".weight").map(str::to_owned),
            _ => None,
        };
        self.tensors.iter().filter_map(module).collect()
    }

    /// Removes and returns a tensor of a module.
    pub(super) fn take(&mut self, module: &str, name: &str) -> Option<Part<'a>> {
        let name = format!("{module}.{name}");
        let TensorEntry { at, shape, stored, .. } = self.tensors.remove(&name)?;
        Some(Part { name, shape, stored, at, files: self.files })
    }

    pub(super) fn require(&mut self, module: &str, name: &str) -> Result<Part<'a>, CheckpointError> {
        self.take(module, name).ok_or_else(|| CheckpointError::MissingTensor {
            path: self.directory.to_owned(),
            name: shown(&format!("{module}.{name}")),
        })
    }

    /// Removes tensors of a module that are not used.
    pub(super) fn drop(&mut self, module: &str, names: &[&str]) {
        for name in names {
            self.tensors.remove(&format!("{module}.{name}"));
        }
    }

    /// Adds the weight of a module.
    pub(super) fn insert(&mut self, module: &str, matrix: PackedMatrix) -> Result<(), CheckpointError> {
        let name = format!("{module}.weight");
        let entry = TensorEntry {
            at: matrix.codes.at.clone(),
            shape: vec![matrix.rows, matrix.columns],
            stored: StoredType::Packed(Box::new(matrix)),
            order: RowOrder::AsStored,
        };
        let file = self.files[entry.at.file].path();
        match self.tensors.insert(name.clone(), entry) {
            None => {
                self.found += 1;
                Ok(())
            }
            Some(_) => {
                let problem = "the module also has a quantised weight";
                Err(CheckpointError::malformed(file, format!("tensor {}", shown(&name)), problem))
            }
        }
    }

    pub(super) fn found_any(&self) -> bool {
        self.found > 0
    }

    /// The tensors. No part of a quantised matrix is left.
    pub(super) fn finish(self) -> BTreeMap<String, TensorEntry> {
        self.tensors
    }

    /// Rejects a tensor that is a part of a quantised matrix and has not been taken.
    pub(super) fn check_rest(&self, problem: &str) -> Result<(), CheckpointError> {
        const PARTS: [&str; 7] = [
            "qweight",
            "qzeros",
            "scales",
            "weight_packed",
            "weight_scale",
            "weight_scale_inv",
            "weight_zero_point",
        ];
        let is_part = |name: &str| name.rsplit_once('.').is_some_and(|(_, suffix)| PARTS.contains(&suffix));
        match self.tensors.iter().find(|(name, _)| is_part(name)) {
            None => Ok(()),
            Some((name, entry)) => {
                let file = self.files[entry.at.file].path();
                Err(CheckpointError::malformed(file, format!("tensor {}", shown(name)), problem))
            }
        }
    }
}
