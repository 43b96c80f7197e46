//! [`KernelCompiler`]: from a kernel's name to its image for an architecture.

use crate::cache::{Entry, KernelCache};
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
}

/// Compiles kernels, each once.
pub struct KernelCompiler {
    sources: Sources,
    nvrtc: Nvrtc,
    cache: Option<KernelCache>,
}

impl KernelCompiler {
    /// A compiler of these sources, which keeps images in `cache`.
    pub fn new(sources: Sources, nvrtc: Nvrtc, cache: Option<KernelCache>) -> Self {
        Self { sources, nvrtc, cache }
    }

    /// The names of the kernels' files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.names()
    }

    /// The image of a file such as `rms_norm.cu` for an architecture such as `sm_90a`. If `variant` is not empty, it is the
    /// value of the macro `VARIANT`, and only those kernels are compiled.
    pub fn image(&self, name: &str, variant: &str, architecture: &str) -> Result<Vec<u8>, CompileError> {
        let source = self.sources.get(name).ok_or_else(|| CompileError::UnknownKernel(name.to_owned()))?;
        let program = Program { name, source, headers: self.sources.headers() };
        let variant = (!variant.is_empty()).then(|| format!("-DVARIANT={variant}"));
        let options: Vec<&str> = OPTIONS.iter().copied().chain(variant.as_deref()).collect();
        let entry = self.entry(program, architecture, &options);
        if let Some(image) = self.cache.as_ref().and_then(|cache| cache.get(entry)) {
            return Ok(image);
        }
        let image = self.nvrtc.compile(program, architecture, &options)?;
        if let Some(cache) = &self.cache {
            cache.put(entry, &image);
        }
        Ok(image)
    }

    fn entry(&self, program: Program<'_>, architecture: &str, options: &[&str]) -> Entry {
        let version = self.nvrtc.version().to_string();
        let texts = [env!("CARGO_PKG_VERSION"), &version, self.nvrtc.file(), architecture, program.name];
        let headers = program.headers.iter().flat_map(|(name, text)| [name.as_str(), text.as_str()]);
        let options = options.iter().copied();
        Entry::new(texts.into_iter().chain([program.source]).chain(options).chain(headers))
    }
}
