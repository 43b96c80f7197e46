//! The adapters of an engine by name.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_engine::{AdapterId, AdapterUse};

/// The interval at which a load that waits for another one checks that it is wanted.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// An adapter that requests can name.
#[derive(Debug)]
pub struct Adapter {
    pub name: String,
    /// The directory that it was loaded from.
    pub path: PathBuf,
    /// Distinguishes contents of the directory.
    pub version: String,
    /// The name of the adapter in requests to the engine.
    pub id: AdapterId,
    pub usage: Arc<AdapterUse>,
    /// The model for which the adapter was trained, as its configuration names it.
    pub base_model: Option<String>,
    /// The highest rank of its updates.
    pub rank: usize,
    /// The number of linear layers that it updates.
    pub num_modules: usize,
    /// Bytes that it takes on the device.
    pub bytes: u64,
}

/// No adapter has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("adapter {name:?} is not loaded; {}", loaded(.names))]
pub struct AdapterNotFound {
    pub name: String,
    /// The adapters that are loaded.
    pub names: Vec<String>,
}

fn loaded(names: &[String]) -> String {
    if names.is_empty() { "none is".to_owned() } else { format!("loaded are {}", names.join(", ")) }
}

/// An adapter was not loaded.
#[derive(Debug)]
pub enum AdapterLoadError<E> {
    /// Another adapter has the name.
    Conflict(Arc<Adapter>),
    /// The caller did not wait.
    Abandoned,
    /// The load failed.
    Failed(E),
}

/// The adapters by name. Loads of one name are made one after the other.
#[derive(Default)]
pub struct Adapters {
    names: Mutex<BTreeMap<String, Entry>>,
    /// Notified when a load has ended.
    loaded: Condvar,
}

/// At least one of the fields is set.
#[derive(Default)]
struct Entry {
    adapter: Option<Arc<Adapter>>,
    is_loading: bool,
}

impl Adapters {
    /// The adapter of this name.
    pub fn get(&self, name: &str) -> Result<Arc<Adapter>, AdapterNotFound> {
        let names = self.lock();
        let found = names.get(name).and_then(|entry| entry.adapter.clone());
        found.ok_or_else(|| not_found(name, &names))
    }

    /// All adapters, in the order of their names.
    pub fn all(&self) -> Vec<Arc<Adapter>> {
        self.lock().values().filter_map(|entry| entry.adapter.clone()).collect()
    }

    /// Loads an adapter, unless the adapter of this name `is_same`, which is returned then. Another adapter of this name
    /// is a conflict, or with `replace` is returned as the second value once the new one has the name. Waits for
    /// another load of the name.
    pub fn load<E>(
        &self,
        name: &str,
        replace: bool,
        is_same: impl Fn(&Adapter) -> bool,
        is_wanted: &mut dyn FnMut() -> bool,
        load: impl FnOnce() -> Result<Adapter, E>,
    ) -> Result<(Arc<Adapter>, Option<Arc<Adapter>>), AdapterLoadError<E>> {
        let mut names = self.lock();
        while names.get(name).is_some_and(|entry| entry.is_loading) {
            names = self.loaded.wait_timeout(names, CHECK_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
            drop(names); // `is_wanted` may attach to an interpreter
            if !is_wanted() {
                return Err(AdapterLoadError::Abandoned);
            }
            names = self.lock();
        }
        let entry = names.entry(name.to_owned()).or_default();
        if let Some(adapter) = &entry.adapter {
            if is_same(adapter) {
                return Ok((Arc::clone(adapter), None));
            }
            if !replace {
                return Err(AdapterLoadError::Conflict(Arc::clone(adapter)));
            }
        }
        entry.is_loading = true;
        drop(names);
        let loading = Loading { adapters: self, name };
        let adapter = Arc::new(load().map_err(AdapterLoadError::Failed)?);
        let former = loading
            .adapters
            .lock()
            .get_mut(name)
            .and_then(|entry| entry.adapter.replace(Arc::clone(&adapter)));
        Ok((adapter, former))
    }

    /// Takes the name from an adapter.
    pub fn remove(&self, name: &str) -> Result<Arc<Adapter>, AdapterNotFound> {
        let mut names = self.lock();
        let adapter = names.get_mut(name).and_then(|entry| entry.adapter.take());
        let adapter = adapter.ok_or_else(|| not_found(name, &names))?;
        if !names[name].is_loading {
            names.remove(name);
        }
        Ok(adapter)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_found(name: &str, names: &BTreeMap<String, Entry>) -> AdapterNotFound {
    let is_loaded = |(name, entry): (&String, &Entry)| entry.adapter.is_some().then(|| name.clone());
    AdapterNotFound { name: name.to_owned(), names: names.iter().filter_map(is_loaded).collect() }
}

/// The load of a name. When it is dropped, the load has ended.
struct Loading<'a> {
    adapters: &'a Adapters,
    name: &'a str,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        let mut names = self.adapters.lock();
        if let Some(entry) = names.get_mut(self.name) {
            entry.is_loading = false;
            if entry.adapter.is_none() {
                names.remove(self.name);
            }
        }
        self.adapters.loaded.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn adapter(name: &str, id: u64) -> Adapter {
        Adapter {
            name: name.to_owned(),
            path: PathBuf::new(),
            version: id.to_string(),
            id: AdapterId(id),
            usage: Arc::default(),
            base_model: None,
            rank: 8,
            num_modules: 1,
            bytes: 1,
        }
    }

    type Loaded = Result<(Arc<Adapter>, Option<Arc<Adapter>>), AdapterLoadError<&'static str>>;

    /// Loads version `id` under a name.
    fn load(adapters: &Adapters, name: &str, id: u64, replace: bool) -> Loaded {
        let is_same = |adapter: &Adapter| adapter.version == id.to_string();
        adapters.load(name, replace, is_same, &mut || true, || Ok(adapter(name, id)))
    }

    #[test]
    fn a_name_stands_for_one_adapter_until_it_is_removed() {
        let adapters = Adapters::default();
        assert_eq!(adapters.get("a").unwrap_err().to_string(), "adapter \"a\" is not loaded; none is");
        let (first, former) = load(&adapters, "a", 1, false).unwrap();
        assert!(former.is_none());
        assert!(Arc::ptr_eq(&load(&adapters, "a", 1, true).unwrap().0, &first), "the same version");
        assert!(matches!(load(&adapters, "a", 2, false), Err(AdapterLoadError::Conflict(_))));
        load(&adapters, "b", 3, false).unwrap();
        let (second, former) = load(&adapters, "a", 2, true).unwrap();
        assert!(former.is_some_and(|former| Arc::ptr_eq(&former, &first)));
        assert!(Arc::ptr_eq(&adapters.get("a").unwrap(), &second));
        assert_eq!(adapters.remove("a").unwrap().id, AdapterId(2));
        assert_eq!(
            adapters.remove("a").unwrap_err().to_string(),
            "adapter \"a\" is not loaded; loaded are b"
        );
    }

    #[test]
    fn failed_load_leaves_the_name_as_it_was() {
        let adapters = Adapters::default();
        let fail = |replace| {
            let failed = adapters.load("a", replace, |_| false, &mut || true, || Err("no files"));
            assert!(matches!(failed, Err(AdapterLoadError::Failed("no files"))));
        };
        fail(false);
        assert!(adapters.all().is_empty());
        load(&adapters, "a", 1, false).unwrap();
        fail(true);
        assert_eq!(adapters.get("a").unwrap().id, AdapterId(1));
    }

    #[test]
    fn loads_of_a_name_join_and_those_that_are_not_wanted_end() {
        let adapters = Adapters::default();
        let (proceed, wait) = mpsc::channel::<()>();
        let (begun, has_begun) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let adapters = &adapters;
            let first = scope.spawn(move || {
                let load = || {
                    begun.send(()).unwrap();
                    wait.recv().unwrap();
                    Ok::<_, ()>(adapter("a", 1))
                };
                adapters.load("a", false, |_| false, &mut || true, load).unwrap().0
            });
            has_begun.recv().unwrap();
            assert!(adapters.get("a").is_err(), "it is not usable yet");
            let unwanted = adapters.load("a", false, |_| true, &mut || false, || Err(()));
            assert!(matches!(unwanted, Err(AdapterLoadError::Abandoned)));
            let second = scope.spawn(|| load(adapters, "a", 1, false).unwrap().0);
            proceed.send(()).unwrap();
            assert!(Arc::ptr_eq(&first.join().unwrap(), &second.join().unwrap()), "loaded once");
        });
    }
}
