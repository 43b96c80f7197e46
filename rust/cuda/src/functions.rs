//! The driver's functions for a device in use.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::Version;
use crate::driver::Driver;
use crate::error::CudaError;
#[cfg(feature = "testing")]
use crate::observer::Observer;
use crate::table::{Address, functions};

/// Drivers from this version on have the functions of [`Newer`].
const NEWER: Version = Version::new(12, 4);

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

/// All functions that cudarc's library has.
#[derive(Debug)]
pub(crate) struct Functions {
    pub calls: Calls,
    pub newer: Option<Newer>,
    #[cfg(feature = "testing")]
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
            #[cfg(feature = "testing")]
            observer: Observer::load(find),
        };
        Ok(FUNCTIONS.get_or_init(|| functions))
    }
}
