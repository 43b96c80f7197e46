//! Modules of kernels, and their launch.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use bytemuck::{NoUninit, bytes_of};
use cudarc::driver::sys;

use crate::error::{CudaError, INVALID_VALUE};
use crate::functions::Newer;
use crate::{Context, DevicePointer, Stream};

/// The largest number of a kernel's parameters.
const MAX_PARAMETERS: usize = 32;

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
        let mut module = ptr::null_mut();
        // SAFETY: the pointer is valid; the image is the caller's.
        context.within(|| unsafe { context.calls().load_module(&raw mut module, image.as_ptr().cast()) })?;
        Ok(Arc::new(Self { context: context.clone(), module }))
    }

    /// A kernel by its name.
    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Kernel, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::NullCharacter(name.to_owned()))?;
        let mut function = ptr::null_mut();
        // SAFETY: the module is alive, the pointer is valid and the name is a string.
        unsafe { self.context.calls().function(&raw mut function, self.module, text.as_ptr()) }?;
        let parameters =
            self.context.newer().map(|newer| parameters(newer, function).map(Arc::from)).transpose()?;
        Ok(Kernel { module: self.clone(), name: name.into(), function, parameters })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: the module is this object's, and none of its kernels is left.
        self.context.free(|calls| unsafe { calls.unload_module(self.module) });
    }
}

/// The sizes of a kernel's parameters.
fn parameters(newer: &Newer, function: sys::CUfunction) -> Result<Vec<usize>, CudaError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function is alive and the pointers are valid; an index behind the last is an error.
        match unsafe { newer.parameter(function, sizes.len(), &raw mut offset, &raw mut bytes) } {
            Ok(()) => sizes.push(bytes),
            Err(error) if error.code() == INVALID_VALUE => return Ok(sizes),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A kernel that can be launched.
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Arc<Module>,
    name: Arc<str>,
    function: sys::CUfunction,
    /// The sizes of its parameters; `None` if the driver does not say.
    parameters: Option<Arc<[usize]>>,
}

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for Kernel {}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
pub unsafe trait Parameter: NoUninit {}

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

/// An argument of a launch: its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument<'a>(pub &'a [u8]);

impl<'a, T: Parameter> From<&'a T> for Argument<'a> {
    fn from(value: &'a T) -> Self {
        Self(bytes_of(value))
    }
}

impl Kernel {
    /// Whether it is the same kernel of the same module.
    pub fn is(&self, other: &Self) -> bool {
        self.function == other.function
    }

    /// Allows launches with more than 48 KiB of dynamic shared memory, at most as much as the device has for a block.
    pub fn set_shared_limit(&self, bytes: u32) -> Result<(), CudaError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let calls = self.module.context.calls();
        // SAFETY: the function is alive.
        Ok(unsafe { calls.set_function_attribute(self.function, attribute, bytes.cast_signed()) }?)
    }

    /// Launches the kernel in a stream. Copies the arguments, and allocates nothing.
    ///
    /// # Safety
    ///
    /// The arguments have the types of the parameters; until the kernel has ended, the memory behind them lives, and is
    /// not used by operations that do not wait for the kernel.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        arguments: &[Argument<'_>],
    ) -> Result<(), CudaError> {
        self.check(arguments)?;
        let mut addresses = [ptr::null_mut(); MAX_PARAMETERS];
        for (address, argument) in addresses.iter_mut().zip(arguments) {
            *address = argument.0.as_ptr().cast_mut().cast::<c_void>();
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
        Ok(unsafe {
            let calls = self.module.context.calls();
            calls.launch(&raw const config, self.function, addresses.as_mut_ptr(), ptr::null_mut())
        }?)
    }

    /// An error unless the arguments have the sizes of the parameters.
    fn check(&self, arguments: &[Argument<'_>]) -> Result<(), CudaError> {
        let given = arguments.iter().map(|argument| argument.0.len());
        let is_right = match &self.parameters {
            Some(expected) => given.clone().eq(expected.iter().copied()),
            None => true,
        };
        if is_right && arguments.len() <= MAX_PARAMETERS {
            return Ok(());
        }
        let expected = self.parameters.as_deref().unwrap_or_default().to_vec();
        Err(CudaError::Arguments { kernel: self.name.to_string(), expected, given: given.collect() })
    }
}
