//! [`Cublas`]: cuBLASLt, NVIDIA's library of matrix products, which is found when the program runs. A
//! [`MatrixProduct`] is a product of one shape with the algorithm that the library estimates to be the fastest.
//!
//! The algorithm depends on the number of rows, so a row has other bits in other batches.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{ManuallyDrop, size_of};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libloading::os::unix::Library;

use crate::error::CudaError;
use crate::library::{NotFound, Search, Status, library_functions};
use crate::{Context, DevicePointer, Stream, Version};

/// Alignment of every address of a product, and of the rows of its matrices, in bytes.
pub const CUBLAS_ALIGNMENT: usize = 16;

/// Values of the library's enumerations, which are the same in every version.
const COMPUTE_FLOAT32: c_int = 68;
const FLOAT32: c_int = 0;
const FLOAT16: c_int = 2;
const BFLOAT16: c_int = 14;
const TRANSPOSED: c_int = 1;
const DESCRIPTION_TRANSPOSE_A: c_int = 3;
const DESCRIPTION_EPILOGUE: c_int = 7;
const DESCRIPTION_BIAS: c_int = 8;
const EPILOGUE_BIAS: c_int = 4;
const PREFERENCE_WORKSPACE: c_int = 1;
/// Of the matrices A, B, C and D.
const PREFERENCE_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
const NOT_SUPPORTED: Status = 15;

type Handle = *mut c_void;

/// An algorithm of the library, with its settings.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Algorithm([u64; 8]);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Heuristic {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

library_functions! {
    /// The functions of the library.
    Functions {
        version = "cublasLtGetVersion": fn() -> usize;
        status_name = "cublasLtGetStatusName": fn(Status) -> *const c_char;
        create = "cublasLtCreate": fn(*mut Handle);
        destroy = "cublasLtDestroy": fn(Handle);
        create_description = "cublasLtMatmulDescCreate": fn(*mut Handle, c_int, c_int);
        set_description = "cublasLtMatmulDescSetAttribute": fn(Handle, c_int, *const c_void, usize);
        destroy_description = "cublasLtMatmulDescDestroy": fn(Handle);
        create_layout = "cublasLtMatrixLayoutCreate": fn(*mut Handle, c_int, u64, u64, i64);
        destroy_layout = "cublasLtMatrixLayoutDestroy": fn(Handle);
        create_preference = "cublasLtMatmulPreferenceCreate": fn(*mut Handle);
        set_preference = "cublasLtMatmulPreferenceSetAttribute": fn(Handle, c_int, *const c_void, usize);
        destroy_preference = "cublasLtMatmulPreferenceDestroy": fn(Handle);
        find_algorithm = "cublasLtMatmulAlgoGetHeuristic":
            fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int);
        multiply = "cublasLtMatmul":
            fn(
                Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle,
                *const Algorithm, u64, usize, *mut c_void
            );
    }
}

impl Functions {
    fn check(&self, function: &'static str, status: Status) -> Result<(), CublasError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any number, and returns null or a static string.
        let name = unsafe {
            let name = (self.status_name)(status);
            if name.is_null() { None } else { Some(CStr::from_ptr(name).to_string_lossy().into_owned()) }
        };
        let name = name.unwrap_or_else(|| format!("status {status}"));
        Err(CublasError::Call { function, name })
    }

    /// Sets an attribute of a description.
    fn set<T: Copy>(&self, description: &mut Object, attribute: c_int, value: &T) -> Result<(), CublasError> {
        // SAFETY: the description is alive, and copies the value.
        let status = unsafe {
            let value = ptr::from_ref(value).cast::<c_void>();
            (self.set_description)(description.object, attribute, value, size_of::<T>())
        };
        self.check("cublasLtMatmulDescSetAttribute", status)
    }
}

/// An error of the library, or of finding it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CublasError {
    /// No library can be used.
    #[error(
        "cuBLASLt is not available: {0}; install the package nvidia-cublas, or nvidia-cublas-cu12 for drivers of CUDA \
        12"
    )]
    NotFound(NotFound),
    /// A call failed.
    #[error("{function} failed with {name}")]
    Call {
        /// The function.
        function: &'static str,
        /// The library's name of the error.
        name: String,
    },
}

/// The library, loaded.
pub struct Cublas {
    functions: Functions,
    version: Version,
    path: PathBuf,
    _library: ManuallyDrop<Library>,
}

impl Cublas {
    /// The first library that can be used.
    pub fn find(search: &Search) -> Result<Self, CublasError> {
        let open = |path: &Path, library| Self::open(path, library, search);
        search.find("libcublasLt.so", open).map_err(CublasError::NotFound)
    }

    fn open(path: &Path, library: ManuallyDrop<Library>, search: &Search) -> Result<Self, String> {
        // SAFETY: the library's functions have these types from version 12 on.
        let functions = unsafe { Functions::load(&library) }?;
        // SAFETY: the function has no requirements.
        let number = unsafe { (functions.version)() };
        let version = Version::new((number / 10000) as u32, (number / 100 % 100) as u32);
        search.check(version)?;
        Ok(Self { functions, version, path: path.to_owned(), _library: library })
    }

    /// The version of the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The path of the library, or its name if the system found it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The shape of a product `out = x w' (+ out) (+ bias)` of `x [rows][inner]` and `w [outputs][inner]`. `out` is float32,
/// with rows at a distance of `pitch` numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductShape {
    /// Whether `x` and `w` are bfloat16; otherwise they are float16.
    pub is_bf16: bool,
    /// Rows of `x` and `out`.
    pub rows: usize,
    /// Rows of `w`, and columns of `out`.
    pub outputs: usize,
    /// Columns of `x` and `w`.
    pub inner: usize,
    /// The distance of rows of `out`.
    pub pitch: usize,
    /// Whether the product is added to `out`.
    pub accumulates: bool,
    /// Whether a bias of float32 is added.
    pub has_bias: bool,
}

/// The addresses of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductOperands {
    /// The rows.
    pub x: DevicePointer,
    /// The matrix.
    pub w: DevicePointer,
    /// The bias, or null.
    pub bias: DevicePointer,
    /// The result.
    pub out: DevicePointer,
    /// Memory of the algorithm, of as many bytes as the product was made for.
    pub workspace: DevicePointer,
}

/// The library in a context. Opening it takes some memory of the device.
pub struct CublasHandle {
    library: Cublas,
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the library's functions may be called from any thread.
unsafe impl Send for CublasHandle {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for CublasHandle {}

impl CublasHandle {
    /// Opens the library in a context.
    pub fn new(library: Cublas, context: &Arc<Context>) -> Result<Arc<Self>, CudaError> {
        context.bind_thread()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is valid, and the context is current.
        let status = unsafe { (library.functions.create)(&raw mut handle) };
        library.functions.check("cublasLtCreate", status)?;
        Ok(Arc::new(Self { library, context: context.clone(), handle }))
    }

    /// A product, with a workspace of up to `workspace_bytes`; `None` if the library has no algorithm for it.
    pub fn product(
        self: &Arc<Self>,
        shape: ProductShape,
        workspace_bytes: usize,
    ) -> Result<Option<MatrixProduct>, CudaError> {
        let ProductShape { is_bf16, rows, outputs, inner, pitch, accumulates, has_bias } = shape;
        let functions = &self.library.functions;
        let numbers = if is_bf16 { BFLOAT16 } else { FLOAT16 };
        let layout = |kind, rows: usize, columns: usize, pitch: usize| {
            Object::new("cublasLtMatrixLayoutCreate", self, functions.destroy_layout, |object| {
                // SAFETY: the pointer is valid.
                unsafe { (functions.create_layout)(object, kind, rows as u64, columns as u64, pitch as i64) }
            })
        };
        let description =
            Object::new("cublasLtMatmulDescCreate", self, functions.destroy_description, |object| {
                // SAFETY: the pointer is valid.
                unsafe { (functions.create_description)(object, COMPUTE_FLOAT32, FLOAT32) }
            })?;
        // The library's matrices are stored by columns: its product is out' = w x'.
        let product = MatrixProduct {
            w: layout(numbers, inner, outputs, inner)?,
            x: layout(numbers, inner, rows, inner)?,
            out: layout(FLOAT32, outputs, rows, pitch)?,
            algorithm: Algorithm([0; 8]),
            workspace_bytes,
            accumulates,
            description: Mutex::new(description),
            handle: Arc::clone(self),
        };
        let mut description = product.description();
        functions.set(&mut description, DESCRIPTION_TRANSPOSE_A, &TRANSPOSED)?;
        if has_bias {
            functions.set(&mut description, DESCRIPTION_EPILOGUE, &EPILOGUE_BIAS)?;
        }
        let algorithm = product.find_algorithm(&description)?;
        drop(description);
        Ok(algorithm.map(|algorithm| MatrixProduct { algorithm, ..product }))
    }
}

impl Drop for CublasHandle {
    fn drop(&mut self) {
        self.context.free(|_| {
            // SAFETY: the handle is this object's, and no product is left.
            let status = unsafe { (self.library.functions.destroy)(self.handle) };
            if let Err(error) = self.library.functions.check("cublasLtDestroy", status) {
                log::warn!("{error}");
            }
            Ok(())
        });
    }
}

/// An object of the library in the memory of the host.
struct Object {
    object: Handle,
    destroy: unsafe extern "C" fn(Handle) -> Status,
}

impl Object {
    fn new(
        function: &'static str,
        library: &CublasHandle,
        destroy: unsafe extern "C" fn(Handle) -> Status,
        create: impl FnOnce(*mut Handle) -> Status,
    ) -> Result<Self, CublasError> {
        let mut object = ptr::null_mut();
        library.library.functions.check(function, create(&raw mut object))?;
        Ok(Self { object, destroy })
    }
}

// SAFETY: the library's functions may be called from any thread.
unsafe impl Send for Object {}
// SAFETY: as above; nothing in an object changes but by `Functions::set`, which takes it exclusively.
unsafe impl Sync for Object {}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the object is this one's.
        unsafe { (self.destroy)(self.object) };
    }
}

/// A product of one shape.
pub struct MatrixProduct {
    /// Has the address of the bias.
    description: Mutex<Object>,
    w: Object,
    x: Object,
    out: Object,
    algorithm: Algorithm,
    workspace_bytes: usize,
    accumulates: bool,
    handle: Arc<CublasHandle>,
}

impl MatrixProduct {
    fn functions(&self) -> &Functions {
        &self.handle.library.functions
    }

    fn description(&self) -> MutexGuard<'_, Object> {
        self.description.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_algorithm(&self, description: &Object) -> Result<Option<Algorithm>, CublasError> {
        let functions = self.functions();
        let preference = Object::new(
            "cublasLtMatmulPreferenceCreate",
            &self.handle,
            functions.destroy_preference,
            |object| {
                // SAFETY: the pointer is valid.
                unsafe { (functions.create_preference)(object) }
            },
        )?;
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the preference is alive, and copies a value of this size.
            let status = unsafe { (functions.set_preference)(preference.object, attribute, value, bytes) };
            functions.check("cublasLtMatmulPreferenceSetAttribute", status)
        };
        set(PREFERENCE_WORKSPACE, (&raw const self.workspace_bytes).cast(), size_of::<usize>())?;
        let alignment = CUBLAS_ALIGNMENT as u32;
        for attribute in PREFERENCE_ALIGNMENTS {
            set(attribute, (&raw const alignment).cast(), size_of::<u32>())?;
        }
        let mut found = Heuristic {
            algorithm: Algorithm([0; 8]),
            workspace_bytes: 0,
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut count = 0;
        // SAFETY: all objects are alive, and there is room for one result.
        let status = unsafe {
            (functions.find_algorithm)(
                self.handle.handle,
                description.object,
                self.w.object,
                self.x.object,
                self.out.object,
                self.out.object,
                preference.object,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        if status == NOT_SUPPORTED || (status == 0 && (count == 0 || found.state != 0)) {
            return Ok(None);
        }
        functions.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        Ok(Some(found.algorithm))
    }

    /// Launches the product in a stream.
    ///
    /// # Safety
    ///
    /// The memory at the addresses has the product's shape, and they are multiples of [`CUBLAS_ALIGNMENT`]. Until the
    /// product has ended, the memory lives, and is not used by operations that do not wait for it.
    pub unsafe fn launch(&self, stream: &Stream, operands: &ProductOperands) -> Result<(), CudaError> {
        let ProductOperands { x, w, bias, out, workspace } = *operands;
        let functions = self.functions();
        let mut description = self.description();
        if bias != DevicePointer::NULL {
            functions.set(&mut description, DESCRIPTION_BIAS, &bias.0)?;
        }
        let (one, old) = (1f32, f32::from(u8::from(self.accumulates)));
        // SAFETY: the objects and the stream are alive; the library copies the factors. The memory is the caller's.
        let status = unsafe {
            (functions.multiply)(
                self.handle.handle,
                description.object,
                (&raw const one).cast(),
                w.0,
                self.w.object,
                x.0,
                self.x.object,
                (&raw const old).cast(),
                out.0,
                self.out.object,
                out.0,
                self.out.object,
                &raw const self.algorithm,
                workspace.0,
                self.workspace_bytes,
                stream.handle().cast(),
            )
        };
        Ok(functions.check("cublasLtMatmul", status)?)
    }
}
