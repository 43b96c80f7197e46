//! [`KernelCache`]: compiled kernels in a folder of the user. [`KernelArchive`]: those of a package.
//!
//! A file is written under a temporary name and renamed when it is complete, so processes share a folder without a
//! lock; if two compile the same kernel, the later file replaces an equal one. Images are code that a device runs: a
//! folder that other users may write to is not used, and a file has a checksum.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::system::{NOT_FOLLOWED, create_own, file_of, open_own, others_may_change, own_folder};

/// Bytes at the beginning of a file.
const MAGIC: &[u8; 8] = b"PENSTKCU";
/// Magic bytes and checksum.
const HEADER_LEN: usize = 24;
/// The extension of an entry's file.
const EXTENSION: &str = "cubin";
/// The longest image that is read.
const MAX_IMAGE: u64 = 64 << 20;
/// The age at which temporary files are removed. Their process ended before it renamed them.
const ABANDONED: Duration = Duration::from_secs(3600);

/// The identity of an image: a digest of the texts that it is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(u128);

impl Entry {
    pub fn new<'a>(texts: impl Iterator<Item = &'a str>) -> Self {
        let mut digest = Xxh3::new();
        for text in texts {
            digest.update(&(text.len() as u64).to_le_bytes());
            digest.update(text.as_bytes());
        }
        Self(digest.digest128())
    }

    pub fn file_name(self) -> String {
        format!("{:032x}.{EXTENSION}", self.0)
    }

    /// The checksum of an image under this name, so that a renamed file is refused.
    fn checksum(self, image: &[u8]) -> [u8; 16] {
        (xxh3_128(image) ^ self.0).to_le_bytes()
    }
}

/// A folder of images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCache {
    folder: PathBuf,
    most_bytes: u64,
}

impl KernelCache {
    /// The cache in a folder, which is created with access for the user alone. An error if other users may change it.
    pub fn open(folder: &Path, most_bytes: u64) -> io::Result<Self> {
        own_folder(folder)?;
        Ok(Self { folder: folder.to_owned(), most_bytes })
    }

    /// An image. Removes its file if that is damaged.
    pub(crate) fn get(&self, entry: Entry) -> Option<Vec<u8>> {
        let path = self.folder.join(entry.file_name());
        match read_own(&path, entry) {
            Ok(image) => Some(image),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) if !is_damage(&error) => {
                log::warn!("{} cannot be read: {error}", path.display());
                None
            }
            Err(error) => {
                log::warn!("{} is removed from the cache of kernels: {error}", path.display());
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    /// Keeps an image, and removes the least recently used ones beyond the size of the cache.
    pub(crate) fn put(&self, entry: Entry, image: &[u8]) {
        if let Err(error) = self.write(entry, image) {
            log::warn!("a kernel cannot be cached in {}: {error}", self.folder.display());
        }
        self.evict(SystemTime::now());
    }

    fn write(&self, entry: Entry, image: &[u8]) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = entry.file_name();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = self.folder.join(format!(".{name}.{}-{number}.tmp", std::process::id()));
        let file = create_own(&temporary)?;
        let written = write(file, entry, image).and_then(|()| fs::rename(&temporary, self.folder.join(name)));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn evict(&self, now: SystemTime) {
        let Ok(files) = self.folder.read_dir() else { return };
        let mut entries = Vec::new();
        for file in files.flatten() {
            let path = file.path();
            let Ok(metadata) = file.metadata() else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if path.extension().is_some_and(|extension| extension == EXTENSION) {
                entries.push((used, metadata.len(), path));
            } else if path.extension().is_some_and(|extension| extension == "tmp")
                && now.duration_since(used).is_ok_and(|age| age > ABANDONED)
            {
                let _ = fs::remove_file(&path);
            }
        }
        entries.sort();
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in entries {
            if total <= self.most_bytes {
                break;
            }
            if fs::remove_file(&path).is_ok() {
                total -= bytes;
            }
        }
    }
}

/// Compiled kernels of a package. Those of NVRTC 12 for sm_90a are in the folder `cuda12/sm_90a`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelArchive {
    folder: PathBuf,
}

impl KernelArchive {
    /// The archive in a folder, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The folder `kernels` beside the library that this code is part of.
    pub fn of_package() -> Self {
        let library = file_of(Self::of_package as *const _);
        Self::new(library.map_or_else(PathBuf::new, |library| library.with_file_name("kernels")))
    }

    fn path(&self, entry: Entry, compiler: u32, architecture: &str) -> PathBuf {
        self.folder.join(format!("cuda{compiler}")).join(architecture).join(entry.file_name())
    }

    /// An image of a compiler of this major version.
    pub(crate) fn get(&self, entry: Entry, compiler: u32, architecture: &str) -> Option<Vec<u8>> {
        let path = self.path(entry, compiler, architecture);
        let image = File::open(&path).and_then(|file| read(&file, entry));
        let report = |error: &io::Error| {
            if error.kind() != io::ErrorKind::NotFound {
                log::warn!("{} cannot be read, and the kernel is compiled: {error}", path.display());
            }
        };
        image.inspect_err(report).ok()
    }

    /// Adds an image.
    pub(crate) fn put(
        &self,
        entry: Entry,
        compiler: u32,
        architecture: &str,
        image: &[u8],
    ) -> io::Result<()> {
        let path = self.path(entry, compiler, architecture);
        fs::create_dir_all(path.parent().expect("the folder of an architecture"))?;
        write(File::create(path)?, entry, image)
    }
}

/// Whether an error is about the file. Others, such as that the process has no free descriptor, are not lasting.
fn is_damage(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData || error.raw_os_error() == Some(NOT_FOLLOWED)
}

/// Reads and verifies a file of this user, and marks it as used.
fn read_own(path: &Path, entry: Entry) -> io::Result<Vec<u8>> {
    let file = open_own(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || others_may_change(&metadata).is_some() {
        return Err(damaged("it is not a file of this user alone"));
    }
    let image = read(&file, entry)?;
    mark_used(&file);
    Ok(image)
}

/// Reads and verifies an image.
fn read(file: &File, entry: Entry) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_IMAGE).read_to_end(&mut bytes)?;
    let (header, image) = bytes.split_at_checked(HEADER_LEN).ok_or_else(|| damaged("it is cut off"))?;
    if !header.starts_with(MAGIC) || header[MAGIC.len()..] != entry.checksum(image) {
        return Err(damaged("its checksum is wrong"));
    }
    bytes.drain(..HEADER_LEN);
    Ok(bytes)
}

fn write(mut file: File, entry: Entry, image: &[u8]) -> io::Result<()> {
    file.write_all(MAGIC)?;
    file.write_all(&entry.checksum(image))?;
    file.write_all(image)
}

fn damaged(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// The time of the last use is the file's modification time.
fn mark_used(file: &File) {
    let _ = file.set_modified(SystemTime::now());
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;
    use crate::system::user;

    /// An empty folder, removed when it is dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("penstock-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).expect("a folder");
            Self(path)
        }

        fn open(&self) -> io::Result<KernelCache> {
            KernelCache::open(&self.0.join("kernels"), 1 << 20)
        }

        fn cache(&self) -> KernelCache {
            self.open().expect("a cache")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn entry(text: &str) -> Entry {
        Entry::new([text].into_iter())
    }

    fn files(cache: &KernelCache) -> Vec<PathBuf> {
        let mut files: Vec<_> =
            cache.folder.read_dir().expect("a folder").flatten().map(|file| file.path()).collect();
        files.sort();
        files
    }

    #[test]
    fn images_are_found_under_their_own_texts_only() {
        let scratch = Scratch::new("kernels-found");
        let cache = scratch.cache();
        cache.put(entry("a"), b"image of a");
        assert_eq!(scratch.cache().get(entry("a")).as_deref(), Some(&b"image of a"[..]));
        assert_eq!(cache.get(entry("b")), None);
        assert_ne!(Entry::new(["ab", "c"].into_iter()), Entry::new(["a", "bc"].into_iter()));
        assert_eq!(files(&cache).len(), 1, "no temporary file is left");
    }

    #[test]
    fn folder_and_files_are_private() {
        let scratch = Scratch::new("kernels-private");
        let cache = scratch.cache();
        cache.put(entry("a"), b"image");
        let mode = |path: &Path| path.metadata().expect("a file").mode() & 0o777;
        assert_eq!(mode(&cache.folder), 0o700);
        assert_eq!(mode(&files(&cache)[0]), 0o600);
    }

    #[test]
    fn folder_that_others_may_change_is_refused() {
        let scratch = Scratch::new("kernels-hostile");
        let folder = scratch.cache().folder;
        for mode in [0o720, 0o702, 0o777] {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).expect("permissions");
            let error = scratch.open().expect_err("a refusal");
            assert_eq!(error.to_string(), "other users may write to it", "{mode:o}");
        }
        fs::remove_dir(&folder).expect("a folder");
        let other = scratch.0.join("other");
        fs::create_dir(&other).expect("a folder");
        symlink(&other, &folder).expect("a link");
        assert_eq!(scratch.open().expect_err("a refusal").to_string(), "it is not a directory");
        fs::remove_file(&folder).expect("a link");
        fs::write(&folder, "text").expect("a file");
        assert_eq!(scratch.open().expect_err("a refusal").to_string(), "it is not a directory");
    }

    #[test]
    fn folder_of_another_user_is_refused() {
        let scratch = Scratch::new("kernels-foreign");
        let own = scratch.cache().folder;
        // Only root can give a folder to another user; for others, that of root is one.
        let is_given = std::os::unix::fs::chown(&own, Some(user() + 1), None).is_ok();
        let foreign = if is_given { own.as_path() } else { Path::new("/usr") };
        let error = KernelCache::open(foreign, 0).expect_err("a refusal");
        assert_eq!(error.to_string(), "it belongs to another user");
    }

    #[test]
    fn damaged_files_are_removed_and_written_again() {
        let scratch = Scratch::new("kernels-damaged");
        let cache = scratch.cache();
        let image = vec![7; 1000];
        let path = cache.folder.join(entry("a").file_name());
        cache.put(entry("a"), &image);
        let whole = fs::read(&path).expect("a file");
        let cut = [0, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 999].map(|length| whole[..length].to_vec());
        let changed = [0, MAGIC.len(), HEADER_LEN + 5].map(|place| {
            let mut bytes = whole.clone();
            bytes[place] ^= 1;
            bytes
        });
        for (index, bytes) in cut.iter().chain(&changed).enumerate() {
            fs::write(&path, bytes).expect("a file");
            assert_eq!(cache.get(entry("a")), None, "damage {index}");
            assert!(!path.exists(), "damage {index}");
        }
        cache.put(entry("a"), &image);
        assert_eq!(cache.get(entry("a")), Some(image));
    }

    #[test]
    fn links_and_renamed_files_are_not_read() {
        let scratch = Scratch::new("kernels-links");
        let cache = scratch.cache();
        cache.put(entry("a"), b"image");
        let (a, b) = (cache.folder.join(entry("a").file_name()), cache.folder.join(entry("b").file_name()));
        symlink(&a, &b).expect("a link");
        assert_eq!(cache.get(entry("b")), None);
        assert!(b.symlink_metadata().is_err(), "the link is removed");
        fs::rename(&a, &b).expect("a file");
        assert_eq!(cache.get(entry("b")), None);
        let writable = fs::Permissions::from_mode(0o666);
        cache.put(entry("a"), b"image");
        fs::set_permissions(&a, writable).expect("permissions");
        assert_eq!(cache.get(entry("a")), None);
    }

    #[test]
    fn least_recently_used_images_are_removed() {
        let scratch = Scratch::new("kernels-evicted");
        let cache = KernelCache { most_bytes: 3 * 124, ..scratch.cache() };
        let path = |name: &str| cache.folder.join(entry(name).file_name());
        let age = |path: &Path, seconds| {
            let time = SystemTime::now() - Duration::from_secs(seconds);
            File::open(path).and_then(|file| file.set_modified(time)).expect("a time");
        };
        for (name, seconds) in [("a", 30), ("b", 20), ("c", 10)] {
            cache.put(entry(name), &[0; 100]);
            age(&path(name), seconds);
        }
        assert!(cache.get(entry("a")).is_some(), "now it is the most recently used");
        let (old, young) = (cache.folder.join(".x.1-0.tmp"), cache.folder.join(".x.1-1.tmp"));
        for (temporary, seconds) in [(&old, 9999), (&young, 5)] {
            fs::write(temporary, "part").expect("a file");
            age(temporary, seconds);
        }
        cache.put(entry("d"), &[0; 100]);
        let names = ["a", "b", "c", "d"].map(|name| path(name).exists());
        assert_eq!(names, [true, false, true, true]);
        assert_eq!([old.exists(), young.exists()], [false, true]);
    }

    #[test]
    fn writers_of_one_image_do_not_disturb_each_other() {
        let scratch = Scratch::new("kernels-writers");
        let cache = scratch.cache();
        let image = vec![3; 100_000];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        cache.put(entry("a"), &image);
                        assert_eq!(cache.get(entry("a")).as_ref(), Some(&image));
                    }
                });
            }
        });
        assert_eq!(files(&cache).len(), 1);
    }
}
