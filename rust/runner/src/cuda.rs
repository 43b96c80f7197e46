//! CUDA as the process finds it: the settings of the environment, the report of `penstock info`, and the kernel
//! compiler.

use std::path::PathBuf;

use penstock_cuda::{
    Architecture, Cublas, CublasError, Device, Driver, KernelArchive, KernelCache, KernelCompiler, Nvrtc,
    NvrtcError, Search, Sources, Unavailable,
};
use penstock_types::FieldError;

/// Size of the cache of compiled kernels.
const MAX_CACHE_BYTES: u64 = 256 << 20;

/// The variable with the architecture that kernels are compiled for.
pub(crate) const CUDA_ARCH: &str = "PENSTOCK_CUDA_ARCH";

/// The settings of CUDA.
#[derive(Clone, Debug, Default)]
pub struct CudaSettings {
    /// The value of `CUDA_VISIBLE_DEVICES`, which the driver reads itself.
    pub visible_devices: Option<String>,
    /// The architecture that kernels are compiled for, such as `sm_90`; `None` uses all instructions of the device.
    pub architecture: Option<String>,
    /// The library of the compiler; `None` searches.
    pub nvrtc: Option<PathBuf>,
    /// The library of cuBLASLt; `None` searches.
    pub cublas: Option<PathBuf>,
    /// Folders in which the compiler and cuBLASLt are searched first.
    pub library_folders: Vec<PathBuf>,
    /// A folder of kernels to compile instead of the embedded ones.
    pub kernel_directory: Option<PathBuf>,
    /// The folder of kernels that were compiled before; `None` is that of the package.
    pub archive_directory: Option<PathBuf>,
    /// The folder of compiled kernels; `None` keeps none.
    pub cache_directory: Option<PathBuf>,
}

/// A device as `penstock info` reports it. Texts are empty if it cannot be described.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CudaDevice {
    pub index: u32,
    pub name: String,
    pub compute_capability: String,
    pub total_memory: u64,
    pub free_memory: Option<u64>,
    pub uuid: String,
    pub pci_address: String,
    pub reason: Option<String>,
}

/// The reason why CUDA, a device or the compiler cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CudaUnavailable {
    /// There is no driver, or it cannot use the device.
    #[error(transparent)]
    Device(#[from] Unavailable),
    /// The compiler cannot be used.
    #[error(transparent)]
    Compiler(#[from] NvrtcError),
    /// A setting is not valid.
    #[error(transparent)]
    Setting(#[from] FieldError),
    /// The folder of kernels cannot be read.
    #[error("the kernels in {} cannot be read: {error}", .folder.display())]
    Kernels { folder: PathBuf, error: std::io::Error },
}

impl CudaUnavailable {
    /// Whether there is no device, so that nothing is wrong.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Self::Device(reason) if reason.is_absent())
    }
}

/// A device with a driver, and kernels for it.
pub(crate) struct UsableDevice {
    pub driver: Driver,
    pub device: Device,
    pub compiler: KernelCompiler,
}

/// The report on the driver, its devices, the compiler and cuBLASLt.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaInfo {
    pub driver_version: Option<String>,
    pub devices: Vec<CudaDevice>,
    pub reason: Option<String>,
    pub compiler_version: Option<String>,
    pub compiler_path: Option<String>,
    pub compiler_reason: Option<String>,
    pub cublas_version: Option<String>,
    pub cublas_path: Option<String>,
    pub cublas_reason: Option<String>,
}

impl CudaSettings {
    /// Describes the driver, its devices, the compiler and cuBLASLt. Slow: creates a context on each device.
    pub fn info(&self) -> CudaInfo {
        let driver = Driver::open(self.visible_devices.as_deref());
        let devices = driver.as_ref().map_or_else(|error| Err(error.clone()), devices);
        let nvrtc = self.nvrtc(driver.as_ref().ok());
        let cublas = self.cublas(driver.as_ref().ok()).map(|cublas| {
            let found = (cublas.version().to_string(), cublas.path().display().to_string());
            cublas.unload();
            found
        });
        let (devices, error) = match devices {
            Ok(devices) => (devices, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let is_usable = devices.iter().any(|device| device.reason.is_none());
        let first = || devices.first().and_then(|device| device.reason.clone());
        CudaInfo {
            driver_version: driver.ok().map(|driver| driver.version().to_string()),
            reason: error.or_else(|| if is_usable { None } else { first() }),
            devices,
            compiler_version: nvrtc.as_ref().ok().map(|nvrtc| nvrtc.version().to_string()),
            compiler_path: nvrtc.as_ref().ok().map(|nvrtc| nvrtc.path().display().to_string()),
            compiler_reason: nvrtc.err().map(|error| error.to_string()),
            cublas_version: cublas.as_ref().ok().map(|found| found.0.clone()),
            cublas_path: cublas.as_ref().ok().map(|found| found.1.clone()),
            cublas_reason: cublas.err().map(|error| error.to_string()),
        }
    }

    /// A device that can be used, or the reason why it cannot.
    pub(crate) fn find(&self, index: u32) -> Result<UsableDevice, CudaUnavailable> {
        let driver = Driver::open(self.visible_devices.as_deref())?;
        let mut device = Device::read(&driver, index)?;
        device.check()?;
        if let Some(name) = &self.architecture {
            device.architecture = architecture(&device, name)?;
        }
        let compiler = self.compiler(Some(&driver))?;
        compiler.check(&device.architecture.to_string())?;
        Ok(UsableDevice { driver, device, compiler })
    }

    /// A compiler of kernels for a driver, or for any.
    pub fn compiler(&self, driver: Option<&Driver>) -> Result<KernelCompiler, CudaUnavailable> {
        let sources = match &self.kernel_directory {
            None => Sources::embedded(),
            Some(folder) => Sources::read(folder)
                .map_err(|error| CudaUnavailable::Kernels { folder: folder.clone(), error })?,
        };
        let cache = self.cache_directory.as_ref().and_then(|folder| {
            let cache = KernelCache::open(folder, MAX_CACHE_BYTES);
            cache
                .inspect_err(|error| log::warn!("kernels are not cached in {}: {error}", folder.display()))
                .ok()
        });
        let archive =
            self.archive_directory.clone().map_or_else(KernelArchive::of_package, KernelArchive::new);
        let version = driver.map(Driver::version);
        Ok(KernelCompiler::new(sources, self.nvrtc(driver), archive, cache, version))
    }

    /// The norms of rows by a kernel on the first device.
    #[cfg(feature = "testing")]
    pub fn rms_norm(&self, x: &[f32], weight: &[f32]) -> Result<Vec<f32>, String> {
        let compiler = self.compiler(None).map_err(|error| error.to_string())?;
        penstock_cuda::testing::rms_norm(&compiler, x, weight).map_err(|error| error.to_string())
    }

    /// A program of [`penstock_cuda::testing`] by its name.
    #[cfg(feature = "testing")]
    pub fn program(&self, name: &str) -> Result<(), String> {
        use penstock_cuda::testing;
        let compiler = self.compiler(None).map_err(|error| error.to_string())?;
        let ended = match name {
            "defects" => testing::defects(),
            #[cfg(unix)]
            "fork" => testing::fork(),
            "lost" => testing::lost(&compiler),
            "threads" => testing::threads(&compiler),
            other => Err(format!("there is no program {other}").into()),
        };
        ended.map_err(|error| error.to_string())
    }

    fn nvrtc(&self, driver: Option<&Driver>) -> Result<Nvrtc, NvrtcError> {
        Nvrtc::find(&self.search(self.nvrtc.as_ref(), driver))
    }

    /// cuBLASLt for a driver, or for any.
    pub(crate) fn cublas(&self, driver: Option<&Driver>) -> Result<Cublas, CublasError> {
        Cublas::find(&self.search(self.cublas.as_ref(), driver))
    }

    fn search(&self, library: Option<&PathBuf>, driver: Option<&Driver>) -> Search {
        let folders = self.library_folders.clone();
        Search { library: library.cloned(), folders, driver: driver.map(Driver::version) }
    }
}

/// The architecture of this name, if the device runs its kernels.
fn architecture(device: &Device, name: &str) -> Result<Architecture, FieldError> {
    let all = || Architecture::of(device.compute_capability);
    all().find(|architecture| architecture.to_string() == name).ok_or_else(|| {
        let names: Vec<String> = all().map(|architecture| architecture.to_string()).collect();
        FieldError::new(
            CUDA_ARCH,
            name,
            format!("an architecture of {}: {}", device.name, names.join(" or ")),
        )
    })
}

fn devices(driver: &Driver) -> Result<Vec<CudaDevice>, Unavailable> {
    Ok((0..driver.num_devices()?).map(|index| describe(driver, index)).collect())
}

/// A device whose description fails does not hide the others.
fn describe(driver: &Driver, index: u32) -> CudaDevice {
    let device = match Device::read(driver, index) {
        Ok(device) => device,
        Err(error) => {
            return CudaDevice { index, reason: Some(error.to_string()), ..CudaDevice::default() };
        }
    };
    let free = device.check().and_then(|()| device.free_memory(driver));
    CudaDevice {
        index,
        compute_capability: device.compute_capability.to_string(),
        total_memory: device.total_memory,
        free_memory: free.as_ref().ok().copied(),
        reason: free.err().map(|error| error.to_string()),
        name: device.name,
        uuid: device.uuid,
        pci_address: device.pci_address,
    }
}
