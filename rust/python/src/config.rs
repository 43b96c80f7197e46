//! `EngineConfig`: reading its keywords, and the configuration of a launch.

use std::path::PathBuf;

use penstock_frontend::config;
use penstock_frontend::field::Field;
use penstock_runner::{LaunchConfig, LaunchError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::class;
use crate::classes::PyEngineConfig;
use crate::errors::Error;
use crate::value::{PyValue, config_error};

impl PyEngineConfig {
    /// The configuration with the fields that `fields` has.
    pub fn with(mut self, fields: Option<&Bound<'_, PyDict>>) -> Result<Self, Error> {
        class::set_all("EngineConfig", fields, |name, value| {
            config::set(&mut self.config, name, value.map(PyValue).as_ref()).map_err(config_error)
        })?;
        self.check()?;
        Ok(self)
    }

    /// Checks the fields together, as far as they do not depend on the model.
    fn check(&self) -> Result<(), Error> {
        let checked = match self.config.declared_conflict() {
            Some(conflict) => Err(conflict),
            None => self.config.check().map_err(|error| (error.field, error.limit)),
        };
        checked.or_else(|(field, limit)| {
            Python::attach(|py| {
                let value = Bound::new(py, self.clone())?.getattr(field)?;
                Err(config_error(Field::new(field).refuse(&PyValue(value), limit)))
            })
        })
    }

    /// The configuration of a launch. Fields that are not set come from the environment; the libraries of CUDA are
    /// searched in `cuda_folders` first.
    pub fn with_environment(&self, cuda_folders: Vec<PathBuf>) -> Result<LaunchConfig, Error> {
        let config = LaunchConfig::from_environment(self.config.clone(), cuda_folders);
        Ok(config.map_err(LaunchError::Config)?)
    }
}
