//! The cache of packed weights: converted models in a directory, by the identity of the original files.
//!
//! An entry is written under a temporary name and renamed when it is complete, so processes share a directory without a
//! lock. If two processes write the same entry, the later process uses the entry of the earlier. Removed files stay
//! mapped while they are in use. Weights are used as they are in an entry, so the directory and its entries belong to
//! the user, and no other user may write to them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use penstock_checkpoint::{Checkpoint, CheckpointError, WriteError};
use penstock_cuda::{others_may_change, own_folder};
use penstock_device::Load;
use penstock_models::{
    ConvertOptions, ModelConfig, ModelError, ProgressCallback, WeightFormats, weight_bytes,
};
use penstock_types::EngineConfig;
use xxhash_rust::xxh3::xxh3_128;

use crate::{LaunchConfig, LaunchError};

/// The file in an entry. Its modification time is the time of the last use.
const USED: &str = "model.penstock";
/// The age at which temporary files are removed. Their process ended before it renamed them.
const ABANDONED: Duration = Duration::from_secs(3600);
/// Characters of the name of an entry.
const NAME_LEN: usize = 32;

/// The cache of a configuration.
pub(crate) struct WeightsCache<'a> {
    directory: &'a Path,
    most_bytes: u64,
}

impl<'a> WeightsCache<'a> {
    /// `None` if the cache is not enabled.
    pub(crate) fn new(config: &'a LaunchConfig) -> Option<Self> {
        let most_bytes = config.options.weights_cache_bytes.filter(|bytes| *bytes > 0)?;
        Some(Self { directory: config.cache_directory.as_deref()?, most_bytes })
    }

    /// The entry of a model. Writes the entry if it does not exist; `None` if that fails, and the weights are then
    /// loaded.
    pub(crate) fn open<B: Load>(
        &self,
        backend: &B,
        checkpoint: &Checkpoint,
        options: &EngineConfig,
        (model, formats): (&ModelConfig, &WeightFormats),
        threads: usize,
        progress: ProgressCallback<'_>,
    ) -> Result<Option<Checkpoint>, LaunchError> {
        if checkpoint.conversion().is_some() {
            return Ok(None);
        }
        let layout = backend.packed_layout().name;
        let Ok(name) = entry_name(checkpoint, options, layout) else { return Ok(None) };
        if let Err(error) = own_folder(self.directory) {
            log::warn!("weights are not cached in {}: {error}", self.directory.display());
            return Ok(None);
        }
        let path = self.directory.join(name);
        let bytes = weight_bytes(backend, model, formats).total();
        if let Some(found) = find(&path, threads, &mut || progress(0, bytes))? {
            return Ok(Some(found));
        }
        if bytes > self.most_bytes {
            log::warn!(
                "the weights of {bytes} bytes exceed weights_cache_bytes={}; they are not cached",
                self.most_bytes
            );
            return Ok(None);
        }
        evict(self.directory, self.most_bytes - bytes, SystemTime::now());
        let options = ConvertOptions {
            output: &path,
            overwrite: false,
            dtype: options.dtype.0.unwrap_or_else(|| checkpoint.dtype()),
            quantization: &options.quantization.to_string(),
        };
        match penstock_models::convert(backend, checkpoint, model, formats, options, progress) {
            Ok(()) | Err(ModelError::Write(WriteError::Refused { .. })) => {
                find(&path, threads, &mut || progress(bytes, bytes))
            }
            Err(ModelError::Write(error)) => {
                log::warn!("the packed weights are not cached: {error}");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Opens and verifies an entry. Removes a damaged entry, and one that other users may change.
fn find(
    path: &Path,
    threads: usize,
    proceed: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Option<Checkpoint>, LaunchError> {
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    match check_own(path) {
        Ok(()) => {}
        Err(error) => {
            log::warn!("the cache entry {} is removed: {error}", path.display());
            let _ = remove_entry(path);
            return Ok(None);
        }
    }
    let opened = Checkpoint::open(path).and_then(|found| Ok((found.verify(threads, proceed)?, found)));
    match opened {
        Ok((ControlFlow::Break(()), _)) => Err(ModelError::Cancelled.into()),
        Ok((ControlFlow::Continue(()), found)) => {
            let now = SystemTime::now();
            let _ = open_for_times(&path.join(USED)).and_then(|file| file.set_modified(now));
            Ok(Some(found))
        }
        Err(error @ CheckpointError::Io { .. }) => {
            log::warn!("a cache entry cannot be read: {error}");
            Ok(None)
        }
        Err(error) => {
            log::warn!("a cache entry is removed: {error}");
            let _ = remove_entry(path);
            Ok(None)
        }
    }
}

/// Opens a file with the right to set its times.
fn open_for_times(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(windows)]
    {
        use std::os::windows::fs::OpenOptionsExt;
        options.access_mode(windows_sys::Win32::Storage::FileSystem::FILE_WRITE_ATTRIBUTES);
    }
    options.open(path)
}

/// Checks that an entry is a directory of files, and that no other user may change any of them.
fn check_own(path: &Path) -> io::Result<()> {
    let refused = |path: &Path, reason: &str| {
        let reason = format!("{}: {reason}", path.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
    };
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return refused(path, "it is not a directory");
    }
    if let Some(reason) = others_may_change(&metadata) {
        return refused(path, reason);
    }
    for file in path.read_dir()? {
        let path = file?.path();
        let metadata = path.symlink_metadata()?;
        if !metadata.is_file() {
            return refused(&path, "it is not a file");
        }
        if let Some(reason) = others_may_change(&metadata) {
            return refused(&path, reason);
        }
    }
    Ok(())
}

/// The name of an entry: a digest of the inputs of the packed weights.
fn entry_name(checkpoint: &Checkpoint, options: &EngineConfig, layout: &str) -> io::Result<String> {
    let mut key = format!(
        "{layout} {} {:?} {:?} {:?} {}",
        env!("CARGO_PKG_VERSION"),
        options.dtype,
        options.quantization,
        options.config_overrides,
        checkpoint.config()
    );
    for file in checkpoint.description().files {
        key += &identity(&file)?;
    }
    Ok(format!("{:032x}", xxh3_128(key.as_bytes())))
}

/// The identity of a file with certain contents. A program can set the time of modification, but not that of the last
/// change of the file's state, and another file that takes the place of this one has another number.
#[cfg(unix)]
fn identity(file: &Path) -> io::Result<String> {
    use std::os::unix::fs::MetadataExt;

    let path = file.canonicalize()?;
    let file = path.metadata()?;
    let (device, number, size) = (file.dev(), file.ino(), file.size());
    let times = [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()];
    Ok(format!(" {path:?} {device} {number} {size} {times:?}"))
}

/// The identity of a file with certain contents: its path, size and times.
#[cfg(windows)]
fn identity(file: &Path) -> io::Result<String> {
    use std::os::windows::fs::MetadataExt;

    let path = file.canonicalize()?;
    let file = path.metadata()?;
    Ok(format!(" {path:?} {} {:?}", file.file_size(), [file.creation_time(), file.last_write_time()]))
}

/// Removes the least recently used entries until at most `most_bytes` remain, and abandoned files.
fn evict(directory: &Path, most_bytes: u64, now: SystemTime) {
    let Ok(files) = directory.read_dir() else { return };
    let (mut entries, mut total) = (Vec::new(), 0);
    for path in files.flatten().map(|file| file.path()) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let is_temporary = name.starts_with('.') && (name.ends_with(".tmp") || name.ends_with(".old"));
        if is_temporary && is_name(&name[1..]) {
            let modified = last_write(&path).unwrap_or(now);
            if now.duration_since(modified).is_ok_and(|age| age > ABANDONED) {
                let _ = fs::remove_dir_all(&path);
            }
        } else if is_name(name) && name.len() == NAME_LEN {
            let (used, bytes) = use_and_size(&path);
            total += bytes;
            entries.push((used, bytes, path));
        }
    }
    entries.sort();
    for (_, bytes, path) in entries {
        if total <= most_bytes {
            break;
        }
        if remove_entry(&path).is_ok() {
            total -= bytes;
        }
    }
}

/// Removes an entry. Windows does not rename an entry that an engine has open: it stays, with all its files.
fn remove_entry(path: &Path) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let old = path.with_file_name(format!(".{name}.{}.old", std::process::id()));
    fs::rename(path, &old)?;
    // Files that stay are removed when they are abandoned.
    let _ = fs::remove_dir_all(&old);
    Ok(())
}

/// The last modification of a directory or of a file in it.
fn last_write(path: &Path) -> Option<SystemTime> {
    let files = path.read_dir().into_iter().flatten().flatten().map(|file| file.path());
    files
        .chain([path.to_owned()])
        .filter_map(|path| path.metadata().and_then(|file| file.modified()).ok())
        .max()
}

/// Whether a name starts with the name of an entry.
fn is_name(name: &str) -> bool {
    name.len() >= NAME_LEN && name.bytes().take(NAME_LEN).all(|byte| byte.is_ascii_hexdigit())
}

/// The time of the last use of an entry, and its size.
fn use_and_size(path: &Path) -> (SystemTime, u64) {
    let used = path.join(USED).metadata().and_then(|metadata| metadata.modified());
    let size = |file: PathBuf| file.metadata().map_or(0, |metadata| metadata.len());
    let files = path.read_dir().into_iter().flatten().flatten();
    (used.unwrap_or(SystemTime::UNIX_EPOCH), files.map(|file| size(file.path())).sum())
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::time::Instant;

    use super::*;

    /// An empty directory.
    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("penstock-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory");
        directory
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("permissions");
    }

    #[test]
    fn contents_of_the_same_size_and_time_have_another_identity() {
        let directory = directory("identity");
        let file = directory.join("model.safetensors");
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let write = |path: &Path, contents: &str| {
            fs::write(path, contents).expect("a file");
            File::open(path).and_then(|file| file.set_modified(time)).expect("a time");
        };
        write(&file, "first");
        let first = identity(&file).expect("an identity");
        assert_eq!(identity(&file).expect("an identity"), first);
        // The clock of the file system has a resolution of some milliseconds: writes until it has moved.
        let begin = Instant::now();
        let written = loop {
            write(&file, "other");
            let written = identity(&file).expect("an identity");
            if written != first {
                break written;
            }
            assert!(begin.elapsed() < Duration::from_secs(10), "written in place, with the same identity");
        };
        let other = directory.join("other");
        write(&other, "third");
        fs::rename(&other, &file).expect("a file");
        assert_ne!(identity(&file).expect("an identity"), written, "replaced");
        fs::remove_dir_all(&directory).expect("a directory");
    }

    #[test]
    fn entries_that_others_may_change_are_removed() {
        let directory = directory("entries");
        let entry = directory.join("entry");
        let file = entry.join(USED);
        let make = || {
            let _ = fs::remove_dir_all(&entry);
            let _ = fs::remove_file(&entry);
            fs::create_dir(&entry).expect("a directory");
            fs::write(&file, "weights").expect("a file");
            set_mode(&entry, 0o755);
            set_mode(&file, 0o644);
        };
        make();
        check_own(&entry).expect("an entry of this user");
        let refused = |expected: &str| {
            let error = check_own(&entry).expect_err(expected).to_string();
            assert!(error.ends_with(expected), "{error}");
            let found = find(&entry, 1, &mut || ControlFlow::Continue(())).expect("no error");
            assert!(found.is_none());
            assert!(entry.symlink_metadata().is_err(), "the entry is removed");
        };
        for (path, mode) in
            [(&entry, 0o775), (&entry, 0o757), (&entry, 0o777), (&file, 0o664), (&file, 0o646)]
        {
            make();
            set_mode(path, mode);
            refused("other users may write to it");
        }
        let other_user = 65534;
        for path in [&entry, &file] {
            make();
            // Only the superuser can give a file away.
            if chown(path, Some(other_user), None).is_ok() {
                refused("it belongs to another user");
            }
        }
        make();
        fs::create_dir(entry.join("directory")).expect("a directory");
        refused("it is not a file");
        make();
        let moved = directory.join("moved");
        fs::rename(&entry, &moved).expect("a directory");
        symlink(&moved, &entry).expect("a link");
        let error = check_own(&entry).expect_err("a link").to_string();
        assert!(error.ends_with("it is not a directory"), "{error}");
        fs::remove_dir_all(&directory).expect("a directory");
    }

    #[test]
    fn eviction_removes_the_least_recently_used_entries_only() {
        let directory = std::env::temp_dir().join(format!("penstock-evict-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        let now = SystemTime::now();
        let make = |name: &str, age: u64, bytes: usize| {
            let path = directory.join(name);
            fs::create_dir_all(&path).expect("a directory");
            fs::write(path.join(USED), vec![0; bytes]).expect("a file");
            let time = now - Duration::from_secs(age);
            for path in [path.join(USED), path] {
                File::open(path).and_then(|file| file.set_modified(time)).expect("a time");
            }
        };
        let names = ["a", "b", "c"].map(|letter| letter.repeat(NAME_LEN));
        make(&names[0], 30, 100);
        make(&names[1], 10, 100);
        make(&names[2], 20, 100);
        make("other", 9999, 100);
        make(&format!(".{}.7-0.tmp", names[0]), 9999, 100);
        make(&format!(".{}.7-1.tmp", names[0]), 5, 100);
        let left = || {
            let mut left: Vec<_> =
                directory.read_dir().expect("a directory").flatten().map(|file| file.file_name()).collect();
            left.sort();
            left
        };
        evict(&directory, 250, now);
        let young = format!(".{}.7-1.tmp", names[0]);
        assert_eq!(left(), [young.as_str(), &names[1], &names[2], "other"]);
        evict(&directory, 100, now);
        assert_eq!(left(), [young.as_str(), &names[1], "other"]);
        evict(&directory, 0, now);
        assert_eq!(left(), [young.as_str(), "other"]);
        evict(Path::new("/nonexistent"), 0, now);
        fs::remove_dir_all(&directory).expect("a directory");
    }
}
