//! Modules of kernels, and their launch.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::error::{CudaError, Named};
use crate::{Context, DevicePointer, Stream, Version};

/// The largest number of a kernel's parameters.
const MAX_PARAMETERS: usize = 32;
/// Drivers from this version on know the parameters of a kernel.
pub(crate) const HAS_PARAMETERS: Version = Version::new(12, 4);

/// An image on a device.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing in the module changes.
unsafe impl Sync for Module {}

impl Module {
    /// Loads an image that the compiler has made for the device.
    ///
    /// # Safety
    ///
    /// The image is complete: the driver reads as much as its headers say.
    pub unsafe fn load(context: &Arc<Context>, image: &[u8]) -> Result<Arc<Self>, CudaError> {
        // SAFETY: the caller's.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.named("cuModuleLoadData")?;
        Ok(Arc::new(Self { context: context.clone(), module }))
    }

    /// A kernel by its name.
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::NullCharacter(name.to_owned()))?;
        // SAFETY: the module is alive.
        let function =
            unsafe { result::module::get_function(self.module, text) }.named("cuModuleGetFunction")?;
        let has_parameters = self.context.driver_version() >= HAS_PARAMETERS;
        let parameters = if has_parameters { Some(parameters(function)?) } else { None };
        Ok(Kernel { _module: self.clone(), name: name.to_owned(), function, parameters })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: the module is this object's, and none of its kernels is left.
        self.context.free(|| unsafe { result::module::unload(self.module) }.named("cuModuleUnload"));
    }
}

/// The sizes of a kernel's parameters.
fn parameters(function: sys::CUfunction) -> Result<Vec<usize>, CudaError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is alive and the pointers are valid; an index behind the last is an error.
        let status =
            unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &raw mut offset, &raw mut size) };
        if status == sys::CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(sizes);
        }
        status.result().named("cuFuncGetParamInfo")?;
        sizes.push(size);
    }
}

/// A kernel that can be launched.
#[derive(Debug)]
pub struct Kernel {
    _module: Arc<Module>,
    name: String,
    function: sys::CUfunction,
    /// The sizes of its parameters; `None` if the driver does not say.
    parameters: Option<Vec<usize>>,
}

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Kernel {}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// The number of blocks in each dimension.
    pub blocks: [u32; 3],
    /// The number of threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether its blocks may start before the previous kernel has ended, for which they wait themselves.
    pub is_dependent: bool,
}

/// A type that kernels take as a parameter.
///
/// # Safety
///
/// Its bytes are those of the parameter's type in C.
pub unsafe trait Parameter: Copy {}

// SAFETY: the type is a pointer's number.
unsafe impl Parameter for DevicePointer {}
// SAFETY: the type is `int`.
unsafe impl Parameter for i32 {}
// SAFETY: the type is `unsigned`.
unsafe impl Parameter for u32 {}
// SAFETY: the type is `float`.
unsafe impl Parameter for f32 {}
// SAFETY: the type is `unsigned long long`.
unsafe impl Parameter for u64 {}

/// An argument of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Argument<'a> {
    address: *const c_void,
    bytes: usize,
    value: PhantomData<&'a ()>,
}

impl<'a, T: Parameter> From<&'a T> for Argument<'a> {
    fn from(value: &'a T) -> Self {
        Self { address: ptr::from_ref(value).cast(), bytes: size_of::<T>(), value: PhantomData }
    }
}

impl Kernel {
    /// Launches the kernel in a stream. Copies the arguments, and allocates nothing.
    ///
    /// # Safety
    ///
    /// The arguments have the types of the parameters; until the kernel has ended, the memory behind them lives, and is not
    /// used by operations that do not wait for the kernel.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        arguments: &[Argument<'_>],
    ) -> Result<(), CudaError> {
        self.check(arguments)?;
        let mut addresses = [ptr::null_mut(); MAX_PARAMETERS];
        for (address, argument) in addresses.iter_mut().zip(arguments) {
            *address = argument.address.cast_mut();
        }
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let [x, y, z] = grid.blocks;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: stream.handle(),
            attrs: &raw mut attribute,
            numAttrs: grid.is_dependent.into(),
        };
        // SAFETY: the pointers are valid, with an address for each parameter; the driver copies the arguments.
        let status = unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.function, addresses.as_mut_ptr(), ptr::null_mut())
        };
        status.result().named("cuLaunchKernelEx")
    }

    /// An error unless the arguments have the sizes of the parameters.
    fn check(&self, arguments: &[Argument<'_>]) -> Result<(), CudaError> {
        let given = arguments.iter().map(|argument| argument.bytes);
        let is_right = match &self.parameters {
            Some(expected) => given.clone().eq(expected.iter().copied()),
            None => true,
        };
        if is_right && arguments.len() <= MAX_PARAMETERS {
            return Ok(());
        }
        let expected = self.parameters.clone().unwrap_or_default();
        Err(CudaError::Arguments { kernel: self.name.clone(), expected, given: given.collect() })
    }
}
