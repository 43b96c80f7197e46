//! [`KernelCompiler`]: from a kernel's name to its image for an architecture.

use crate::Version;
use crate::cache::{Entry, KernelArchive, KernelCache};
use crate::nvrtc::{Nvrtc, NvrtcError, Program};
use crate::sources::Sources;

/// The compiler's options, besides the architecture.
pub const OPTIONS: &[&str] = &["-std=c++17", "-default-device"];

/// A kernel cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The compiler's error.
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    /// There is no file of this name.
    #[error("there is no kernel {0}")]
    UnknownKernel(String),
    /// An image cannot be added to the archive.
    #[error("the archive of kernels cannot be written: {0}")]
    Archive(String),
}

/// The major versions of compilers that can have made an archive.
const ARCHIVED: std::ops::RangeInclusive<u32> = 12..=13;

/// Compiles kernels, each once.
pub struct KernelCompiler {
    sources: Sources,
    /// The compiler. Kernels of the archive need none.
    nvrtc: Result<Nvrtc, NvrtcError>,
    archive: KernelArchive,
    cache: Option<KernelCache>,
    /// The major version of CUDA that the driver supports.
    driver: u32,
}

impl KernelCompiler {
    /// A compiler of these sources for a driver, or for any. It keeps images in `cache`.
    pub fn new(
        sources: Sources,
        nvrtc: Result<Nvrtc, NvrtcError>,
        archive: KernelArchive,
        cache: Option<KernelCache>,
        driver: Option<Version>,
    ) -> Self {
        let driver = driver.map_or(u32::MAX, |version| version.major);
        Self { sources, nvrtc, archive, cache, driver }
    }

    /// The names of the kernels' files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.names()
    }

    /// The error of the compiler, unless the archive has kernels for an architecture.
    pub fn check(&self, architecture: &str) -> Result<(), NvrtcError> {
        let Err(error) = &self.nvrtc else { return Ok(()) };
        let is_archived =
            |name| self.build(name, "").is_ok_and(|build| build.archived(architecture).is_some());
        if self.names().any(is_archived) { Ok(()) } else { Err(error.clone()) }
    }

    /// The image of a file such as `rms_norm.cu` for an architecture such as `sm_90a`. If `variant` is not empty, it is
    /// the value of the macro `VARIANT`, and only those kernels are compiled.
    pub fn image(&self, name: &str, variant: &str, architecture: &str) -> Result<Vec<u8>, CompileError> {
        let build = self.build(name, variant)?;
        if let Some(image) = build.archived(architecture) {
            return Ok(image);
        }
        let nvrtc = self.nvrtc.as_ref().map_err(NvrtcError::clone)?;
        let entry = build.entry(&nvrtc.version().to_string(), nvrtc.file(), architecture);
        if let Some(image) = self.cache.as_ref().and_then(|cache| cache.get(entry)) {
            return Ok(image);
        }
        let image = build.compile(nvrtc, architecture)?;
        if let Some(cache) = &self.cache {
            cache.put(entry, &image);
        }
        Ok(image)
    }

    /// Compiles a file for an architecture, and adds the image to the archive.
    pub fn add_to_archive(&self, name: &str, variant: &str, architecture: &str) -> Result<(), CompileError> {
        let build = self.build(name, variant)?;
        let nvrtc = self.nvrtc.as_ref().map_err(NvrtcError::clone)?;
        let image = build.compile(nvrtc, architecture)?;
        let entry = build.archive_entry(architecture);
        let added = self.archive.put(entry, nvrtc.version().major, architecture, &image);
        added.map_err(|error| CompileError::Archive(error.to_string()))
    }

    fn build<'a>(&'a self, name: &'a str, variant: &str) -> Result<Build<'a>, CompileError> {
        let source = self.sources.get(name).ok_or_else(|| CompileError::UnknownKernel(name.to_owned()))?;
        let program = Program { name, source, headers: self.sources.headers() };
        let variant = (!variant.is_empty()).then(|| format!("-DVARIANT={variant}"));
        Ok(Build { compiler: self, program, variant })
    }
}

/// A program with its options.
struct Build<'a> {
    compiler: &'a KernelCompiler,
    program: Program<'a>,
    /// The option that selects kernels.
    variant: Option<String>,
}

impl Build<'_> {
    fn options(&self) -> Vec<&str> {
        OPTIONS.iter().copied().chain(self.variant.as_deref()).collect()
    }

    fn compile(&self, nvrtc: &Nvrtc, architecture: &str) -> Result<Vec<u8>, NvrtcError> {
        nvrtc.compile(self.program, architecture, &self.options())
    }

    /// The newest image of the archive that the driver can load.
    fn archived(&self, architecture: &str) -> Option<Vec<u8>> {
        let KernelCompiler { archive, driver, .. } = self.compiler;
        // Images without the suffix also run on devices of a higher minor version. The archive of sm_80 has none that
        // would use instructions of these devices alone.
        let later = architecture.starts_with("sm_8").then_some("sm_80");
        let architectures = [Some(architecture), later.filter(|later| *later != architecture)];
        let mut images = architectures.into_iter().flatten().flat_map(|architecture| {
            let entry = self.archive_entry(architecture);
            let majors = ARCHIVED.rev().filter(|major| major <= driver);
            majors.filter_map(move |major| archive.get(entry, major, architecture))
        });
        images.next()
    }

    /// The identity of an image of the archive.
    fn archive_entry(&self, architecture: &str) -> Entry {
        self.entry("", "", architecture)
    }

    /// The identity of an image of a compiler with this version and file.
    fn entry(&self, version: &str, file: &str, architecture: &str) -> Entry {
        let Program { name, source, headers } = self.program;
        let texts = [env!("CARGO_PKG_VERSION"), version, file, architecture, name];
        let headers = headers.iter().flat_map(|(name, text)| [name.as_str(), text.as_str()]);
        Entry::new(texts.into_iter().chain([source]).chain(self.options()).chain(headers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NotFound;

    #[test]
    fn driver_loads_archived_kernels_of_its_own_and_older_versions() {
        let folder = std::env::temp_dir().join(format!("penstock-archive-{}", std::process::id()));
        let compiler = |major| {
            let missing = Err(NvrtcError::NotFound(NotFound(Vec::new())));
            let archive = KernelArchive::new(folder.clone());
            KernelCompiler::new(
                Sources::embedded(),
                missing,
                archive,
                None,
                Some(Version { major, minor: 0 }),
            )
        };
        let image = |major| compiler(major).image("copy.cu", "", "sm_90a").ok();
        let put = |major, image: &[u8]| {
            let compiler = compiler(12);
            let build = compiler.build("copy.cu", "").expect("a kernel");
            let added = compiler.archive.put(build.archive_entry("sm_90a"), major, "sm_90a", image);
            added.expect("an archive");
        };
        put(13, b"of 13");
        assert_eq!([image(12), image(13)], [None, Some(b"of 13".to_vec())]);
        assert!(compiler(12).check("sm_90a").is_err());
        assert!(compiler(13).check("sm_90a").is_ok());
        assert!(compiler(13).check("sm_80").is_err());
        put(12, b"of 12");
        assert_eq!([image(12), image(13)], [Some(b"of 12".to_vec()), Some(b"of 13".to_vec())]);
        std::fs::remove_dir_all(&folder).expect("a folder");
    }
}
