//! The adapters of an engine by name.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, ThreadId};
use std::time::Duration;

use penstock_engine::{AdapterId, AdapterUse};

/// The interval at which a load that waits for another one checks that it is wanted.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The most adapters in an error.
const MAX_LISTED: usize = 10;

/// An adapter that requests can name.
#[derive(Debug)]
pub struct Adapter {
    pub name: String,
    /// The directory that it was loaded from.
    pub path: PathBuf,
    /// A hash of the contents of its files.
    pub version: u64,
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
#[error("adapter {name:?} is not loaded; {}", loaded(.names, *.num_loaded))]
pub struct AdapterNotFound {
    pub name: String,
    /// Some of the adapters that are loaded, or none if only their number is known.
    pub names: Vec<String>,
    pub num_loaded: usize,
}

fn loaded(names: &[String], num_loaded: usize) -> String {
    let others = match num_loaded - names.len() {
        0 => String::new(),
        count => format!(" and {count} others"),
    };
    match names {
        [] if num_loaded == 0 => "no adapter is loaded".to_owned(),
        [] => format!("{num_loaded} other adapters are loaded"),
        names => format!("the loaded adapters are {}{others}", names.join(", ")),
    }
}

/// An adapter was not loaded.
#[derive(Debug)]
pub enum AdapterLoadError<E> {
    /// Another adapter has the name.
    Conflict(Arc<Adapter>),
    /// The caller stopped waiting for another load of the name.
    Abandoned,
    /// The thread loads the name already.
    Nested,
    /// The load failed.
    Failed(E),
}

/// The result of a load.
#[derive(Debug)]
pub struct Loaded {
    pub adapter: Arc<Adapter>,
    /// The adapter that has lost the name.
    pub former: Option<Arc<Adapter>>,
}

/// The adapters by name. Loads of one name are made one after the other.
#[derive(Default)]
pub struct Adapters {
    names: Mutex<BTreeMap<String, Entry>>,
    /// Adapters that lost their name and have requests.
    closing: Mutex<Vec<Arc<Adapter>>>,
    /// Read while a request with an adapter is started.
    starts: RwLock<()>,
    /// Notified when a load has ended.
    loaded: Condvar,
}

/// At least one of the fields is set.
#[derive(Default)]
struct Entry {
    adapter: Option<Arc<Adapter>>,
    /// The thread that loads an adapter of this name.
    loading: Option<ThreadId>,
}

impl Adapters {
    /// The adapter of this name.
    pub fn get(&self, name: &str) -> Result<Arc<Adapter>, AdapterNotFound> {
        let names = self.lock();
        let found = names.get(name).and_then(|entry| entry.adapter.clone());
        found.ok_or_else(|| not_found(name, &names))
    }

    /// Starts a request with the adapter of this name. An adapter that loses its name has the request then.
    pub fn start<T, E: From<AdapterNotFound>>(
        &self,
        name: &str,
        start: impl FnOnce(AdapterId) -> Result<T, E>,
    ) -> Result<T, E> {
        let _starting = self.starts.read().unwrap_or_else(PoisonError::into_inner);
        start(self.get(name)?.id)
    }

    /// All adapters, in the order of their names.
    pub fn all(&self) -> Vec<Arc<Adapter>> {
        self.lock().values().filter_map(|entry| entry.adapter.clone()).collect()
    }

    /// Loads an adapter under a name. `read` reads its files, and `finish` makes the adapter of them; it is given the
    /// adapter that it replaces.
    ///
    /// If the adapter of this name has the same contents, it is returned. Another adapter of this name is a conflict,
    /// or with `replace` loses the name to the new one. Waits for another load of the name.
    pub fn load<F, E>(
        &self,
        name: &str,
        replace: bool,
        is_wanted: &mut dyn FnMut() -> bool,
        read: impl FnOnce() -> Result<(u64, F), E>,
        finish: impl FnOnce(F, Option<&Adapter>) -> Result<Adapter, E>,
    ) -> Result<Loaded, AdapterLoadError<E>> {
        let loading = self.begin(name, is_wanted)?;
        let (version, files) = read().map_err(AdapterLoadError::Failed)?;
        let former = self.get(name).ok();
        match &former {
            Some(adapter) if adapter.version == version => {
                return Ok(Loaded { adapter: Arc::clone(adapter), former: None });
            }
            Some(adapter) if !replace => return Err(AdapterLoadError::Conflict(Arc::clone(adapter))),
            _ => {}
        }
        let adapter = Arc::new(finish(files, former.as_deref()).map_err(AdapterLoadError::Failed)?);
        let former = {
            let mut names = self.lock();
            names.get_mut(name).and_then(|entry| entry.adapter.replace(Arc::clone(&adapter)))
        };
        drop(loading);
        if let Some(former) = &former {
            self.close(former);
        }
        Ok(Loaded { adapter, former })
    }

    /// Marks a name as being loaded by this thread, after another load of it.
    fn begin<'a, E>(
        &'a self,
        name: &'a str,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Result<Loading<'a>, AdapterLoadError<E>> {
        let this = thread::current().id();
        let mut names = self.lock();
        while let Some(thread) = names.get(name).and_then(|entry| entry.loading) {
            if thread == this {
                return Err(AdapterLoadError::Nested);
            }
            names = self.loaded.wait_timeout(names, CHECK_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
            drop(names); // `is_wanted` may attach to an interpreter
            if !is_wanted() {
                return Err(AdapterLoadError::Abandoned);
            }
            names = self.lock();
        }
        names.entry(name.to_owned()).or_default().loading = Some(this);
        Ok(Loading { adapters: self, name })
    }

    /// Takes the name from an adapter. If the name stands for none, these are the adapters that lost it and still have
    /// requests.
    pub fn remove(&self, name: &str) -> Result<Vec<Arc<Adapter>>, AdapterNotFound> {
        let taken = {
            let mut names = self.lock();
            let taken = names.get_mut(name).and_then(|entry| entry.adapter.take());
            if taken.is_some() && names[name].loading.is_none() {
                names.remove(name);
            }
            taken
        };
        if let Some(adapter) = taken {
            self.close(&adapter);
            return Ok(vec![adapter]);
        }
        let closing: Vec<_> = self.closing().iter().filter(|adapter| adapter.name == name).cloned().collect();
        if closing.is_empty() { Err(not_found(name, &self.lock())) } else { Ok(closing) }
    }

    /// Waits for the requests that are being started with an adapter that has lost its name.
    fn close(&self, adapter: &Arc<Adapter>) {
        drop(self.starts.write());
        self.closing().push(Arc::clone(adapter));
    }

    /// The adapters that lost their name, without those that the engine has removed.
    fn closing(&self) -> MutexGuard<'_, Vec<Arc<Adapter>>> {
        let mut closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        closing.retain(|adapter| !adapter.usage.is_removed());
        closing
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_found(name: &str, names: &BTreeMap<String, Entry>) -> AdapterNotFound {
    let loaded = names.iter().filter(|(_, entry)| entry.adapter.is_some()).map(|(name, _)| name);
    AdapterNotFound {
        name: name.to_owned(),
        names: loaded.clone().take(MAX_LISTED).cloned().collect(),
        num_loaded: loaded.count(),
    }
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
            entry.loading = None;
            if entry.adapter.is_none() {
                names.remove(self.name);
            }
        }
        self.adapters.loaded.notify_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn adapter(name: &str, id: u64) -> Adapter {
        Adapter {
            name: name.to_owned(),
            path: PathBuf::new(),
            version: id,
            id: AdapterId(id),
            usage: Arc::default(),
            base_model: None,
            rank: 8,
            num_modules: 1,
            bytes: 1,
        }
    }

    /// Loads version `id` under a name.
    fn load(
        adapters: &Adapters,
        name: &str,
        id: u64,
        replace: bool,
    ) -> Result<Loaded, AdapterLoadError<&'static str>> {
        adapters.load(name, replace, &mut || true, || Ok((id, ())), |(), _| Ok(adapter(name, id)))
    }

    #[test]
    fn a_name_stands_for_one_adapter_until_it_is_removed() {
        let adapters = Adapters::default();
        assert_eq!(
            adapters.get("a").unwrap_err().to_string(),
            "adapter \"a\" is not loaded; no adapter is loaded"
        );
        let Loaded { adapter: first, former } = load(&adapters, "a", 1, false).unwrap();
        assert!(former.is_none());
        assert!(Arc::ptr_eq(&load(&adapters, "a", 1, true).unwrap().adapter, &first), "the same version");
        assert!(matches!(load(&adapters, "a", 2, false), Err(AdapterLoadError::Conflict(_))));
        load(&adapters, "b", 3, false).unwrap();
        let Loaded { adapter: second, former } = load(&adapters, "a", 2, true).unwrap();
        assert!(former.is_some_and(|former| Arc::ptr_eq(&former, &first)));
        assert!(Arc::ptr_eq(&adapters.get("a").unwrap(), &second));
        let ids = |removed: Vec<Arc<Adapter>>| removed.iter().map(|adapter| adapter.id.0).collect::<Vec<_>>();
        assert_eq!(ids(adapters.remove("a").unwrap()), [2]);
        assert_eq!(ids(adapters.remove("a").unwrap()), [1, 2], "those that the engine has not removed");
        assert_eq!(
            adapters.remove("c").unwrap_err().to_string(),
            "adapter \"c\" is not loaded; the loaded adapters are b"
        );
    }

    #[test]
    fn error_lists_some_of_many_adapters() {
        let adapters = Adapters::default();
        for id in 0..14 {
            load(&adapters, &format!("{id:02}"), id, false).unwrap();
        }
        let error = adapters.get("a").unwrap_err();
        let text = error.to_string();
        assert!(
            text.ends_with("the loaded adapters are 00, 01, 02, 03, 04, 05, 06, 07, 08, 09 and 4 others"),
            "{text}"
        );
        let text = AdapterNotFound { names: Vec::new(), ..error }.to_string();
        assert_eq!(text, "adapter \"a\" is not loaded; 14 other adapters are loaded");
    }

    #[test]
    fn nested_load_of_a_name_is_an_error() {
        let adapters = Adapters::default();
        let finish = |(), _: Option<&Adapter>| {
            assert!(matches!(load(&adapters, "a", 2, true), Err(AdapterLoadError::Nested)));
            Ok::<_, ()>(adapter("a", 1))
        };
        adapters.load("a", false, &mut || true, || Ok((1, ())), finish).unwrap();
        assert_eq!(adapters.get("a").unwrap().id, AdapterId(1));
    }

    #[test]
    fn request_that_is_being_started_keeps_its_adapter() {
        let adapters = Adapters::default();
        load(&adapters, "a", 1, false).unwrap();
        let (removed, is_removed) = mpsc::channel();
        thread::scope(|scope| {
            adapters
                .start("a", |_| {
                    scope.spawn(|| removed.send(adapters.remove("a").unwrap()).unwrap());
                    while adapters.get("a").is_ok() {
                        thread::yield_now();
                    }
                    assert!(is_removed.try_recv().is_err(), "the removal waits");
                    Ok::<_, AdapterNotFound>(())
                })
                .unwrap();
            is_removed.recv().unwrap();
        });
    }

    #[test]
    fn failed_load_leaves_the_name_as_it_was() {
        let adapters = Adapters::default();
        let fail = |replace| {
            let finish = |(), _: Option<&Adapter>| unreachable!();
            let failed = adapters.load("a", replace, &mut || true, || Err("no files"), finish);
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
                let finish = |(), _: Option<&Adapter>| {
                    begun.send(()).unwrap();
                    wait.recv().unwrap();
                    Ok::<_, ()>(adapter("a", 1))
                };
                adapters.load("a", false, &mut || true, || Ok((1, ())), finish).unwrap().adapter
            });
            has_begun.recv().unwrap();
            assert!(adapters.get("a").is_err(), "it is not usable yet");
            let finish = |(), _: Option<&Adapter>| unreachable!();
            let unwanted = adapters.load("a", false, &mut || false, || Err(()), finish);
            assert!(matches!(unwanted, Err(AdapterLoadError::Abandoned)));
            let second = scope.spawn(|| load(adapters, "a", 1, false).unwrap().adapter);
            proceed.send(()).unwrap();
            assert!(Arc::ptr_eq(&first.join().unwrap(), &second.join().unwrap()), "loaded once");
        });
    }
}
