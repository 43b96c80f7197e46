//! [`Cublas`]: cuBLASLt, NVIDIA's library of matrix products, which is found when the program runs. A
//! [`MatrixProduct`] is a product of one shape with the algorithm that the library estimates to be the fastest.
//!
//! The algorithm depends on the number of rows, so a row has other bits in other batches.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{ManuallyDrop, offset_of, size_of};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::sys;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t as Attribute;
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t as Preference;

use crate::error::{CublasError, CudaError};
use crate::library::{Search, Status, library_functions};
use crate::system::Library;
use crate::{Context, DevicePointer, Stream, Version};

/// Alignment of the rows of the operands of a product, and of its workspace, in bytes.
pub const CUBLAS_ALIGNMENT: usize = 16;

/// `CUBLAS_OP_T`.
const TRANSPOSED: c_int = 1;

/// Ways to add the parts of a product that is divided between blocks.
const ANY_REDUCTION: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_MASK as u32;
const REDUCTION_IN_PLACE: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_INPLACE as u32;

type Handle = *mut c_void;
type Algorithm = sys::cublasLtMatmulAlgo_t;

/// `cublasLtMatmulHeuristicResult_t`, with a status of any number.
#[repr(C)]
struct Heuristic {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = {
    type Other = sys::cublasLtMatmulHeuristicResult_t;
    assert!(size_of::<Heuristic>() == size_of::<Other>());
    assert!(offset_of!(Heuristic, state) == offset_of!(Other, state));
};

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
        Err(CublasError::Call {
            function,
            status,
            name: name.unwrap_or_else(|| "an unknown error".to_owned()),
        })
    }

    /// Sets an attribute of a description.
    fn set<T: Copy>(
        &self,
        description: &mut Object,
        attribute: Attribute,
        value: &T,
    ) -> Result<(), CublasError> {
        // SAFETY: the description is alive, and copies the value.
        let status = unsafe {
            let value = ptr::from_ref(value).cast::<c_void>();
            (self.set_description)(description.object, attribute as c_int, value, size_of::<T>())
        };
        self.check("cublasLtMatmulDescSetAttribute", status)
    }
}

/// The library, loaded.
pub struct Cublas {
    functions: Functions,
    version: Version,
    path: PathBuf,
    library: ManuallyDrop<Library>,
}

impl Cublas {
    /// The first library that can be used.
    pub fn find(search: &Search) -> Result<Self, CublasError> {
        let open = |path: &Path, library| Self::open(path, library, search);
        search.find("cublasLt", open).map_err(CublasError::NotFound)
    }

    fn open(path: &Path, library: ManuallyDrop<Library>, search: &Search) -> Result<Self, String> {
        // SAFETY: the library's functions have these types from version 12 on.
        let functions = unsafe { Functions::load(&library) }?;
        // SAFETY: the function has no requirements.
        let number = unsafe { (functions.version)() };
        let version = Version::new((number / 10000) as u32, (number / 100 % 100) as u32);
        search.check(version)?;
        Ok(Self { functions, version, path: path.to_owned(), library })
    }

    /// Unloads the library, which takes more than 100 MB. Without a handle, it has no threads and no state.
    pub fn unload(self) {
        drop(ManuallyDrop::into_inner(self.library));
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

/// The shape of a product `out = x w' (+ out) (+ bias)` of `x [rows][inner]` and `w [outputs][inner]`. `out` is
/// float32, with rows at a distance of `pitch` numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductShape {
    /// Whether `x` and `w` are bfloat16; otherwise they are float16.
    pub is_bf16: bool,
    /// Rows of `x` and `out`.
    pub rows: usize,
    /// Rows of `w`, and columns of `out`.
    pub outputs: usize,
    /// Columns of `x` and `w`: a multiple of [`CUBLAS_ALIGNMENT`] bytes.
    pub inner: usize,
    /// The distance of rows of `out`.
    pub pitch: usize,
    /// The alignment of the rows of `out`, and of the bias, in bytes: at most [`CUBLAS_ALIGNMENT`].
    pub alignment: usize,
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
    /// The bias; not used by a product without one.
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
        let mut handle = ptr::null_mut();
        context.within(|| {
            // SAFETY: the pointer is valid, and the context is current.
            let status = unsafe { (library.functions.create)(&raw mut handle) };
            library.functions.check("cublasLtCreate", status).map_err(CudaError::from)
        })?;
        Ok(Arc::new(Self { library, context: context.clone(), handle }))
    }

    /// A product, with a workspace of `workspace_bytes`; `None` if the library has no algorithm for it.
    pub fn product(
        self: &Arc<Self>,
        shape: ProductShape,
        workspace_bytes: usize,
    ) -> Result<Option<MatrixProduct>, CublasError> {
        let functions = &self.library.functions;
        let description =
            Object::new(functions, "cublasLtMatmulDescCreate", functions.destroy_description, |object| {
                let (compute, scale) =
                    (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
                // SAFETY: the pointer is valid.
                unsafe { (functions.create_description)(object, compute as c_int, scale as c_int) }
            })?;
        let mut description = Description { object: description, layouts: self.layouts(&shape)? };
        let object = &mut description.object;
        functions.set(object, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if shape.has_bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as c_int;
            functions.set(object, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            // The choice of the algorithm reads the alignment of the bias from its address.
            let address = shape.alignment as u64;
            functions.set(object, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address)?;
        }
        let algorithm = self.find_algorithm(&description, shape.alignment, workspace_bytes)?;
        Ok(algorithm.map(|algorithm| MatrixProduct {
            description: Mutex::new(description),
            shape,
            algorithm,
            workspace_bytes,
            handle: Arc::clone(self),
        }))
    }

    /// The layouts of `w`, `x` and `out`. The library's matrices are stored by columns: its product is `out' = w x'`.
    fn layouts(&self, shape: &ProductShape) -> Result<[Object; 3], CublasError> {
        let ProductShape { is_bf16, rows, outputs, inner, pitch, .. } = *shape;
        let functions = &self.library.functions;
        let numbers =
            if is_bf16 { sys::cudaDataType_t::CUDA_R_16BF } else { sys::cudaDataType_t::CUDA_R_16F };
        let layout = |kind: sys::cudaDataType_t, rows: usize, columns: usize, pitch: usize| {
            Object::new(functions, "cublasLtMatrixLayoutCreate", functions.destroy_layout, |object| {
                let (rows, columns, pitch) = (rows as u64, columns as u64, pitch as i64);
                // SAFETY: the pointer is valid.
                unsafe { (functions.create_layout)(object, kind as c_int, rows, columns, pitch) }
            })
        };
        Ok([
            layout(numbers, inner, outputs, inner)?,
            layout(numbers, inner, rows, inner)?,
            layout(sys::cudaDataType_t::CUDA_R_32F, outputs, rows, pitch)?,
        ])
    }

    fn find_algorithm(
        &self,
        description: &Description,
        alignment: usize,
        workspace_bytes: usize,
    ) -> Result<Option<Algorithm>, CublasError> {
        let functions = &self.library.functions;
        let preference = Object::new(
            functions,
            "cublasLtMatmulPreferenceCreate",
            functions.destroy_preference,
            |object| {
                // SAFETY: the pointer is valid.
                unsafe { (functions.create_preference)(object) }
            },
        )?;
        let set = |attribute: Preference, value: *const c_void, bytes| {
            // SAFETY: the preference is alive, and copies a value of this size.
            let status =
                unsafe { (functions.set_preference)(preference.object, attribute as c_int, value, bytes) };
            functions.check("cublasLtMatmulPreferenceSetAttribute", status)
        };
        let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        set(most, (&raw const workspace_bytes).cast(), size_of::<usize>())?;
        for (attribute, value) in [
            // With a reduction in place, a product that fails could have changed `out`.
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ANY_REDUCTION & !REDUCTION_IN_PLACE),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLAS_ALIGNMENT as u32),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLAS_ALIGNMENT as u32),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment as u32),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment as u32),
        ] {
            set(attribute, (&raw const value).cast(), size_of::<u32>())?;
        }
        let mut found = Heuristic {
            algorithm: Algorithm { data: [0; 8] },
            workspace_bytes: 0,
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut count = 0;
        let [w, x, out] = description.layouts.each_ref().map(|layout| layout.object);
        // SAFETY: all objects are alive, and there is room for one result.
        let status = unsafe {
            (functions.find_algorithm)(
                self.handle,
                description.object.object,
                w,
                x,
                out,
                out,
                preference.object,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        let has_none = status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as Status;
        if has_none || (status == 0 && (count == 0 || found.state != 0)) {
            return Ok(None);
        }
        functions.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        Ok(Some(found.algorithm))
    }
}

impl Drop for CublasHandle {
    fn drop(&mut self) {
        self.context.free(|_| {
            // SAFETY: the handle is this object's, and no product is left.
            let status = unsafe { (self.library.functions.destroy)(self.handle) };
            if let Err(error) = self.library.functions.check("cublasLtDestroy", status) {
                log::debug!("{error}"); // after the loss of the device, which has been reported
            }
            Ok(())
        });
    }
}

/// An object of the library, in the memory of the host alone: also the child of a fork may free it.
struct Object {
    object: Handle,
    destroy: unsafe extern "C" fn(Handle) -> Status,
}

impl Object {
    fn new(
        functions: &Functions,
        function: &'static str,
        destroy: unsafe extern "C" fn(Handle) -> Status,
        create: impl FnOnce(*mut Handle) -> Status,
    ) -> Result<Self, CublasError> {
        let mut object = ptr::null_mut();
        functions.check(function, create(&raw mut object))?;
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

struct Description {
    /// Has the address of the bias.
    object: Object,
    layouts: [Object; 3],
}

/// A product of one shape.
pub struct MatrixProduct {
    description: Mutex<Description>,
    shape: ProductShape,
    algorithm: Algorithm,
    workspace_bytes: usize,
    handle: Arc<CublasHandle>,
}

impl MatrixProduct {
    /// Whether it computes the same as another one of this handle.
    pub fn is(&self, other: &Self) -> bool {
        self.shape == other.shape
            && self.algorithm.data == other.algorithm.data
            && self.workspace_bytes == other.workspace_bytes
    }

    fn description(&self) -> MutexGuard<'_, Description> {
        self.description.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches the product in a stream of the context, which is current.
    ///
    /// # Safety
    ///
    /// The memory at the addresses has the product's shape and alignment, and the workspace its size. Until the product
    /// has ended, the memory lives, and is not used by operations that do not wait for it.
    pub unsafe fn launch(&self, stream: &Stream, operands: &ProductOperands) -> Result<(), CudaError> {
        let ProductOperands { x, w, bias, out, workspace } = *operands;
        let functions = &self.handle.library.functions;
        let mut description = self.description();
        if self.shape.has_bias {
            let attribute = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            functions.set(&mut description.object, attribute, &bias.0)?;
        }
        let [w_layout, x_layout, out_layout] = description.layouts.each_ref().map(|layout| layout.object);
        let (alpha, beta) = (1f32, f32::from(u8::from(self.shape.accumulates)));
        // SAFETY: the objects and the stream are alive; the library copies the factors. The memory is the caller's.
        let status = unsafe {
            (functions.multiply)(
                self.handle.handle,
                description.object.object,
                (&raw const alpha).cast(),
                w.0,
                w_layout,
                x.0,
                x_layout,
                (&raw const beta).cast(),
                out.0,
                out_layout,
                out.0,
                out_layout,
                &raw const self.algorithm,
                workspace.0,
                self.workspace_bytes,
                stream.handle().cast(),
            )
        };
        Ok(functions.check("cublasLtMatmul", status)?)
    }
}
