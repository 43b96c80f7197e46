//! Adapters: loading and removing them, and the class `Adapter`.

use std::path::Path;

use penstock_checkpoint::AdapterFiles;
use penstock_engine::AdapterError;
use penstock_frontend::adapters::{Adapter, AdapterLoadError, Loaded};
use penstock_frontend::prompt::Frontend;
use penstock_runner::{AdapterLoader, LoadAdapterError, LoadedAdapter, ProgressCallback};

use crate::detach::IsWanted;
use crate::errors::{Error, Problem};

/// The most characters of a name.
const MAX_NAME: usize = 256;

/// An adapter and its use at the moment.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterInfo {
    pub name: String,
    pub path: String,
    pub base_model: Option<String>,
    pub rank: usize,
    pub num_modules: usize,
    pub bytes: u64,
    pub on_device: bool,
    pub running: usize,
    pub waiting: usize,
}

impl From<&Adapter> for AdapterInfo {
    fn from(adapter: &Adapter) -> Self {
        Self {
            name: adapter.name.clone(),
            path: adapter.path.display().to_string(),
            base_model: adapter.base_model.clone(),
            rank: adapter.rank,
            num_modules: adapter.num_modules,
            bytes: adapter.bytes,
            on_device: adapter.usage.is_on_device(),
            running: adapter.usage.num_running(),
            waiting: adapter.usage.num_waiting(),
        }
    }
}

/// Names occur in lists that are separated by commas, and in logs.
pub fn check_name(name: &str) -> Result<(), Error> {
    let is_valid = (1..=MAX_NAME).contains(&name.chars().count())
        && name.trim() == name
        && !name.chars().any(|character| character == ',' || character.is_control());
    if is_valid {
        return Ok(());
    }
    let limit = format!("1 to {MAX_NAME} characters without commas, control characters and outer spaces");
    let message = format!("name={name:?} is not allowed: it must be {limit}");
    Err(Error::Config(Problem { message, field: "name".to_owned(), value: None, limit: Some(limit) }))
}

/// An adapter to be loaded.
pub struct AdapterSource<'a> {
    pub name: &'a str,
    pub path: &'a Path,
    /// Whether it may take the name of another adapter.
    pub replace: bool,
}

impl AdapterSource<'_> {
    /// Loads the adapter. A name that stands for another adapter is a conflict, unless it may be replaced; the requests
    /// of the other one end as usual.
    pub fn load(
        &self,
        frontend: &Frontend,
        loader: &AdapterLoader,
        is_wanted: IsWanted<'_>,
        progress: ProgressCallback<'_>,
    ) -> Result<AdapterInfo, Error> {
        let engine = &frontend.engine;
        let read = || {
            let files = loader.read(self.path)?;
            Ok((files.version(), files))
        };
        let finish = |files: AdapterFiles, former: Option<&Adapter>| {
            let former = former.map(|former| former.id);
            let loaded = loader.load(engine, self.name, &files, former, progress)?;
            Ok(self.adapter(loaded, files.version()))
        };
        match frontend.adapters.load(self.name, self.replace, is_wanted, read, finish) {
            Ok(Loaded { adapter, former }) => {
                if let Some(former) = former {
                    engine.unload_adapter(former.id, None, None);
                }
                Ok((&*adapter).into())
            }
            Err(AdapterLoadError::Conflict(other)) => Err(Error::AdapterConflict(format!(
                "adapter {:?} is loaded from {} with other contents; unload it, or load with replace=True",
                self.name,
                other.path.display()
            ))),
            Err(AdapterLoadError::Abandoned) => {
                Err(Error::Defect("an abandoned load was awaited".to_owned()))
            }
            Err(AdapterLoadError::Nested) => {
                let message = format!("adapter {:?} is being loaded by this thread", self.name);
                Err(Error::AdapterConflict(message))
            }
            Err(AdapterLoadError::Failed(error)) => Err(self.error(error)),
        }
    }

    fn adapter(&self, loaded: LoadedAdapter, version: u64) -> Adapter {
        let LoadedAdapter { id, usage, base_model, rank, num_modules, bytes } = loaded;
        let (name, path) = (self.name.to_owned(), self.path.to_owned());
        Adapter { name, path, version, id, usage, base_model, rank, num_modules, bytes }
    }

    fn error(&self, error: LoadAdapterError) -> Error {
        let files = match error {
            LoadAdapterError::Model(_) => format!("{}: ", self.path.display()),
            LoadAdapterError::Files(_) | LoadAdapterError::Engine(_) => String::new(),
        };
        let message = format!("adapter {:?} cannot be loaded: {files}{error}", self.name);
        match error {
            LoadAdapterError::Engine(AdapterError::Stopped(cause)) => cause.into(),
            LoadAdapterError::Engine(AdapterError::TooMany { .. } | AdapterError::TooManyBytes { .. }) => {
                Error::AdapterLimit(message)
            }
            _ => Error::AdapterFiles(message),
        }
    }
}
