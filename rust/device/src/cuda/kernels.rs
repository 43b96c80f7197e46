//! Kernels: modules are compiled and loaded when a model is opened.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use penstock_cuda::{Context, Device, Kernel, KernelCompiler, Module};
use penstock_types::{Dtype, KvDtype};

use super::operand::Numbers;
use super::tile_shape::WarpgroupTileShape;
use super::upload::run_in_threads;
use super::{allocation, start};
use crate::error::DeviceError;

/// A file and the variant of its kernels that is compiled; an empty one is the whole file.
pub(super) type Source = (&'static str, String);

/// The files of every model, as far as they have no variants.
const COMMON: [&str; 12] = [
    "gemm.cu",
    "gemm_f32.cu",
    "sample.cu",
    "sample_rows.cu",
    "gemm_any.cu",
    "rope_kv.cu",
    "rms_norm.cu",
    "gated.cu",
    "sample_slots.cu",
    "embedding.cu",
    "quantise.cu",
    "copy.cu",
];

/// The file of the kernels of warpgroups, and the architecture that has them.
const WARPGROUPS: &str = "gemm_warpgroup.cu";
const WARPGROUP_ARCHITECTURE: &str = "sm_90a";

/// Loads modules, each once.
pub(super) struct Loader {
    context: Arc<Context>,
    compiler: KernelCompiler,
    architecture: String,
    /// Threads that compile.
    threads: usize,
    modules: HashMap<Source, Arc<Module>>,
}

impl Loader {
    pub fn new(context: &Arc<Context>, compiler: KernelCompiler, device: &Device, threads: usize) -> Self {
        let architecture = device.architecture.to_string();
        Self { context: Arc::clone(context), compiler, architecture, threads, modules: HashMap::new() }
    }

    /// Whether kernels may use warpgroups.
    pub fn has_warpgroups(&self) -> bool {
        self.architecture == WARPGROUP_ARCHITECTURE
    }

    /// Loads the modules of these sources. Those that are not in the cache are compiled by several threads.
    pub fn load_all(&mut self, sources: &[Source]) -> Result<(), DeviceError> {
        let new: Vec<&Source> = sources.iter().filter(|source| !self.modules.contains_key(*source)).collect();
        let images: Vec<OnceLock<_>> = new.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let compile = || {
            while let Some(((file, variant), image)) = {
                let index = next.fetch_add(1, Ordering::Relaxed); // only divides the work
                new.get(index).zip(images.get(index))
            } {
                image.get_or_init(|| self.compiler.image(file, variant, &self.architecture));
            }
        };
        run_in_threads(self.threads.min(new.len()), &compile);
        for (source, image) in new.into_iter().zip(images) {
            let image = image.into_inner().expect("a thread has compiled it");
            let module = self.load(&image.map_err(|error| DeviceError::Start(error.to_string()))?)?;
            self.modules.insert(source.clone(), module);
        }
        Ok(())
    }

    fn load(&self, image: &[u8]) -> Result<Arc<Module>, DeviceError> {
        // SAFETY: the image is the compiler's.
        let module = unsafe { Module::load(&self.context, image) };
        module.map_err(|error| allocation("a module of kernels", image.len(), error))
    }

    /// A kernel of a file, of which `variant` alone is compiled (an empty one: the whole file).
    pub fn kernel(&mut self, file: &'static str, variant: &str, name: &str) -> Result<Kernel, DeviceError> {
        let key = (file, variant.to_owned());
        self.load_all(std::slice::from_ref(&key))?;
        self.modules[&key].kernel(name).map_err(start)
    }
}

/// A kernel for each type of numbers.
pub(super) struct ByDtype([Kernel; 3]);

impl ByDtype {
    /// The kernels `prefix_f32` and so on.
    pub fn load(loader: &mut Loader, file: &'static str, prefix: &str) -> Result<Self, DeviceError> {
        Self::load_from(loader, file, file, prefix)
    }

    /// The same, with the kernel of float32 in a file of its own.
    fn load_from(
        loader: &mut Loader,
        file_f32: &'static str,
        file: &'static str,
        prefix: &str,
    ) -> Result<Self, DeviceError> {
        let mut load = |file, dtype| loader.kernel(file, "", &format!("{prefix}_{}", short_name(dtype)));
        Ok(Self([load(file_f32, Dtype::F32)?, load(file, Dtype::F16)?, load(file, Dtype::Bf16)?]))
    }

    pub fn get(&self, dtype: Dtype) -> &Kernel {
        match dtype {
            Dtype::F32 => &self.0[0],
            Dtype::F16 => &self.0[1],
            Dtype::Bf16 => &self.0[2],
        }
    }
}

/// A kernel for each type of 16 bits.
pub(super) struct ByHalf([Kernel; 2]);

impl ByHalf {
    fn load(loader: &mut Loader, file: &'static str, prefix: &str) -> Result<Self, DeviceError> {
        let mut load = |dtype| loader.kernel(file, "", &format!("{prefix}_{}", short_name(dtype)));
        Ok(Self([load(Dtype::F16)?, load(Dtype::Bf16)?]))
    }

    pub fn get(&self, dtype: Dtype) -> &Kernel {
        &self.0[usize::from(dtype != Dtype::F16)]
    }
}

/// A kernel of products by warpgroups for each tile shape, in the order of `WarpgroupTileShape::ALL`.
pub(super) struct WarpgroupKernels([ByHalf; 4]);

impl WarpgroupKernels {
    fn load(loader: &mut Loader) -> Result<Self, DeviceError> {
        let mut load = |shape: WarpgroupTileShape| -> Result<ByHalf, DeviceError> {
            let kernels = ByHalf::load(loader, WARPGROUPS, shape.kernel())?;
            for kernel in &kernels.0 {
                kernel.set_shared_limit(shape.shared_bytes() as u32).map_err(start)?;
            }
            Ok(kernels)
        };
        let [narrow, middle, wide, widest] = WarpgroupTileShape::ALL;
        Ok(Self([load(narrow)?, load(middle)?, load(wide)?, load(widest)?]))
    }

    pub fn get(&self, shape: WarpgroupTileShape, dtype: Dtype) -> &Kernel {
        self.0[shape as usize].get(dtype)
    }
}

/// A kernel for each type of quantised rows.
pub(super) struct ByNumbers([Kernel; 2]);

impl ByNumbers {
    /// The kernels `prefix_int8` and `prefix_fp8`.
    fn load(loader: &mut Loader, file: &'static str, prefix: &str) -> Result<Self, DeviceError> {
        let mut load = |name| loader.kernel(file, "", &format!("{prefix}_{name}"));
        Ok(Self([load("int8")?, load("fp8")?]))
    }

    pub fn get(&self, numbers: Numbers) -> &Kernel {
        &self.0[numbers as usize]
    }
}

/// The name of a type in the names of kernels.
pub(super) fn short_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "f32",
        Dtype::F16 => "f16",
        Dtype::Bf16 => "bf16",
    }
}

/// The number of a type in arguments of kernels: `FloatType` of `common.cuh`.
pub(super) fn float_type(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

/// The name of a type of the KV cache in the names of kernels.
pub(super) fn short_kv_name(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 => "f32",
        KvDtype::F16 => "f16",
        KvDtype::Bf16 => "bf16",
        KvDtype::Int8 => "int8",
        KvDtype::Uint4 => "uint4",
    }
}

/// The kernels that do not depend on the model.
pub(super) struct CommonKernels {
    pub embed: ByDtype,
    pub rms_norm: ByDtype,
    pub quantised_norm: ByNumbers,
    pub silu_mul: ByDtype,
    pub quantised_silu_mul: ByNumbers,
    pub quantise: ByNumbers,
    pub gather: Kernel,
    pub gather_halves: Kernel,
    pub copy_blocks: Kernel,
    pub gemv: ByDtype,
    pub gemm_narrow: ByDtype,
    /// For the types that tensor cores have.
    pub gemm_middle: ByHalf,
    pub gemm_wide: ByHalf,
    pub add_chains: Kernel,
    /// On devices that have warpgroups.
    pub warpgroups: Option<WarpgroupKernels>,
    /// For rows that are not multiples of 16 bytes.
    pub gemm_any: ByDtype,
}

impl CommonKernels {
    pub fn load(loader: &mut Loader) -> Result<Self, DeviceError> {
        let has_warpgroups = loader.has_warpgroups();
        let own = has_warpgroups.then_some(WARPGROUPS);
        let files: Vec<Source> = COMMON.into_iter().chain(own).map(|file| (file, String::new())).collect();
        loader.load_all(&files)?;
        Ok(Self {
            warpgroups: has_warpgroups.then(|| WarpgroupKernels::load(loader)).transpose()?,
            embed: ByDtype::load(loader, "embedding.cu", "embed")?,
            rms_norm: ByDtype::load(loader, "rms_norm.cu", "rms_norm")?,
            quantised_norm: ByNumbers::load(loader, "rms_norm.cu", "rms_norm")?,
            silu_mul: ByDtype::load(loader, "gated.cu", "silu_mul")?,
            quantised_silu_mul: ByNumbers::load(loader, "gated.cu", "silu_mul")?,
            quantise: ByNumbers::load(loader, "quantise.cu", "quantise")?,
            gather: loader.kernel("copy.cu", "", "gather_rows")?,
            gather_halves: loader.kernel("copy.cu", "", "gather_halves")?,
            copy_blocks: loader.kernel("copy.cu", "", "copy_blocks")?,
            gemv: ByDtype::load_from(loader, "gemm_f32.cu", "gemm.cu", "gemv")?,
            gemm_narrow: ByDtype::load_from(loader, "gemm_f32.cu", "gemm.cu", "gemm_narrow")?,
            gemm_middle: ByHalf::load(loader, "gemm.cu", "gemm_middle")?,
            gemm_wide: ByHalf::load(loader, "gemm.cu", "gemm_wide")?,
            add_chains: loader.kernel("gemm.cu", "", "add_chains")?,
            gemm_any: ByDtype::load(loader, "gemm_any.cu", "gemm_any")?,
        })
    }
}
