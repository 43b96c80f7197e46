//! Tables of the driver's functions. A result is an `i32`: a newer driver may return codes that an enum of today does
//! not have, which would be undefined behaviour.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::driver::Driver;
use crate::error::CudaError;
use crate::{DevicePointer, Stream, Version};

/// A function of any type.
pub(crate) type Address = unsafe extern "C" fn();

/// Drivers from this version on have the functions of [`Newer`].
const NEWER: Version = Version::new(12, 4);

/// Declares a table: for each function a method, its name in the library and its arguments.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($method:ident = $name:literal($($argument:ident: $kind:ty),*);)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $table {
            $($method: unsafe extern "C" fn($($kind),*) -> $crate::library::Status,)*
        }

        impl $table {
            /// Looks the functions up. The error is the name of one that is missing.
            ///
            /// # Safety
            ///
            /// `find` returns the driver's function of a name, which ends with a null character, and the library is
            /// never unloaded.
            unsafe fn load(
                find: impl Fn(&[u8]) -> Option<$crate::functions::Address>,
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    $($method: {
                        let found = find(concat!($name, "\0").as_bytes()).ok_or($name)?;
                        // SAFETY: the driver's function of this name has this signature in every version of CUDA.
                        unsafe {
                            std::mem::transmute::<
                                $crate::functions::Address,
                                unsafe extern "C" fn($($kind),*) -> $crate::library::Status,
                            >(found)
                        }
                    },)*
                })
            }

            $(
                /// # Safety
                ///
                /// The pointers are valid and the handles alive.
                pub(crate) unsafe fn $method(&self, $($argument: $kind),*) -> Result<(), $crate::error::CallError> {
                    // SAFETY: the caller's.
                    $crate::error::CallError::check($name, unsafe { (self.$method)($($argument),*) })
                }
            )*
        }
    };
}
pub(crate) use functions;

functions! {
    /// The functions of a device in use.
    Calls {
        load_module = "cuModuleLoadData"(module: *mut sys::CUmodule, image: *const c_void);
        unload_module = "cuModuleUnload"(module: sys::CUmodule);
        function = "cuModuleGetFunction"(
            function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char
        );
        set_function_attribute = "cuFuncSetAttribute"(
            function: sys::CUfunction, attribute: sys::CUfunction_attribute, value: c_int
        );
        launch = "cuLaunchKernelEx"(
            config: *const sys::CUlaunchConfig, function: sys::CUfunction, arguments: *mut *mut c_void,
            extra: *mut *mut c_void
        );
        create_stream = "cuStreamCreate"(stream: *mut sys::CUstream, flags: c_uint);
        destroy_stream = "cuStreamDestroy_v2"(stream: sys::CUstream);
        synchronize_stream = "cuStreamSynchronize"(stream: sys::CUstream);
        begin_capture = "cuStreamBeginCapture_v2"(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut sys::CUstreamCaptureMode);
        end_capture = "cuStreamEndCapture"(stream: sys::CUstream, graph: *mut sys::CUgraph);
        create_event = "cuEventCreate"(event: *mut sys::CUevent, flags: c_uint);
        destroy_event = "cuEventDestroy_v2"(event: sys::CUevent);
        record_event = "cuEventRecord"(event: sys::CUevent, stream: sys::CUstream);
        query_event = "cuEventQuery"(event: sys::CUevent);
        synchronize_event = "cuEventSynchronize"(event: sys::CUevent);
        instantiate_graph = "cuGraphInstantiateWithFlags"(
            executable: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong
        );
        launch_graph = "cuGraphLaunch"(executable: sys::CUgraphExec, stream: sys::CUstream);
        destroy_executable = "cuGraphExecDestroy"(executable: sys::CUgraphExec);
        destroy_graph = "cuGraphDestroy"(graph: sys::CUgraph);
        allocate = "cuMemAlloc_v2"(pointer: *mut sys::CUdeviceptr, bytes: usize);
        free = "cuMemFree_v2"(pointer: sys::CUdeviceptr);
        allocate_host = "cuMemHostAlloc"(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
        free_host = "cuMemFreeHost"(pointer: *mut c_void);
        upload = "cuMemcpyHtoDAsync_v2"(
            to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream
        );
        download = "cuMemcpyDtoHAsync_v2"(
            to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream
        );
        fill = "cuMemsetD8Async"(to: sys::CUdeviceptr, byte: u8, bytes: usize, stream: sys::CUstream);
    }
}

functions! {
    /// Functions that older drivers do not have.
    Newer {
        parameter = "cuFuncGetParamInfo"(
            function: sys::CUfunction, index: usize, offset: *mut usize, bytes: *mut usize
        );
    }
}

/// Functions of an emulated driver, which checks the program. No other driver has them.
#[derive(Debug)]
pub struct Observer {
    arm: unsafe extern "C" fn(c_int),
    region: unsafe extern "C" fn(c_ulonglong, c_ulonglong, c_int, sys::CUstream),
}

impl Observer {
    /// Begins or ends a step. In a step, allocations and synchronisation are defects.
    pub fn arm(&self, is_armed: bool) {
        // SAFETY: the function takes any number.
        unsafe { (self.arm)(is_armed.into()) };
    }

    /// From this point of a stream on, a range of an arena is in use and not yet written, or is free.
    pub fn region(&self, pointer: DevicePointer, bytes: usize, is_live: bool, stream: &Stream) {
        // SAFETY: the stream is alive, and the function reads no memory.
        unsafe { (self.region)(pointer.0, bytes as c_ulonglong, is_live.into(), stream.handle()) };
    }
}

/// All functions that cudarc's library has.
#[derive(Debug)]
pub(crate) struct Functions {
    pub calls: Calls,
    pub newer: Option<Newer>,
    pub observer: Option<Observer>,
}

/// The functions. cudarc never unloads its library.
static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

impl Functions {
    /// Looks the functions up in the library that cudarc loads. An error if that is not the driver's.
    pub(crate) fn load(driver: &Driver) -> Result<&'static Self, CudaError> {
        if let Some(functions) = FUNCTIONS.get() {
            return Ok(functions);
        }
        // SAFETY: initialisers of a driver have no requirements. A library is found: the driver's name is the last of
        // those that cudarc tries.
        let library = unsafe { sys::culib() };
        // SAFETY: the function is not called with this signature.
        let find = |name: &[u8]| unsafe { library.get::<Address>(name) }.ok().map(|found| *found);
        if !find(b"cuInit\0").is_some_and(|init| driver.is_init(init)) {
            return Err(CudaError::OtherLibrary);
        }
        let has_newer = driver.version() >= NEWER;
        // SAFETY: the library is the driver's.
        let (calls, newer) = unsafe { (Calls::load(find), has_newer.then(|| Newer::load(find))) };
        let functions = Self {
            calls: calls.map_err(CudaError::MissingFunction)?,
            newer: newer.transpose().map_err(CudaError::MissingFunction)?,
            observer: find(b"emuArm\0")
                .zip(find(b"emuRegion\0"))
                .map(|(arm, region)| Observer::new(arm, region)),
        };
        Ok(FUNCTIONS.get_or_init(|| functions))
    }
}

impl Observer {
    fn new(arm: Address, region: Address) -> Self {
        // SAFETY: only the emulated driver has functions of these names, and they have these signatures.
        unsafe {
            Self {
                arm: std::mem::transmute::<Address, unsafe extern "C" fn(c_int)>(arm),
                region: std::mem::transmute::<
                    Address,
                    unsafe extern "C" fn(c_ulonglong, c_ulonglong, c_int, sys::CUstream),
                >(region),
            }
        }
    }
}
