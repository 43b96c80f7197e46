//! DLPack, the other way to share an array: a struct of pointers in a capsule, which whoever takes it renames and later
//! hands back to its deleter; a capsule that nobody took calls the deleter itself. The layouts are those of DLPack's
//! `dlpack.h`, in both forms: the versioned one of 1.0 and the one from before, which cannot say "read-only".

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use super::{Tensor, name_of, unlike};

/// The kind and number of the device that all of our tensors are on.
pub(super) const CPU: (i32, i32) = (1, 0);
const VERSION: Version = Version { major: 1, minor: 0 };
const FLAG_READ_ONLY: u64 = 1;
const FLAG_IS_COPIED: u64 = 2;
const FLOAT32: DataType = DataType { code: 2, bits: 32, lanes: 1 };
const LEGACY: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct View {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    data_type: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Legacy {
    view: View,
    owner: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: Version,
    owner: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    view: View,
}

/// What a capsule points to: the struct comes first, and behind it is what keeps the array alive. Dropped on whatever
/// thread the deleter is called on, attached or not, for nothing of Python's is in it.
#[repr(C)]
struct Lent<M> {
    managed: M,
    _tensor: Tensor,
}

/// The tensor in a capsule of DLPack 1.0.
pub(super) fn versioned(py: Python<'_>, tensor: Tensor, is_copied: bool) -> PyResult<Bound<'_, PyCapsule>> {
    let read_only = if tensor.is_writable { 0 } else { FLAG_READ_ONLY };
    let managed = Versioned {
        version: VERSION,
        owner: ptr::null_mut(),
        deleter: Some(delete::<Versioned>),
        flags: read_only | if is_copied { FLAG_IS_COPIED } else { 0 },
        view: view_of(&tensor),
    };
    lend(py, Lent { managed, _tensor: tensor }, VERSIONED, release_versioned)
}

/// The tensor in a capsule of the form before 1.0.
pub(super) fn legacy(py: Python<'_>, tensor: Tensor) -> PyResult<Bound<'_, PyCapsule>> {
    let (view, deleter) = (view_of(&tensor), Some(delete::<Legacy> as unsafe extern "C" fn(*mut Legacy)));
    let managed = Legacy { view, owner: ptr::null_mut(), deleter };
    lend(py, Lent { managed, _tensor: tensor }, LEGACY, release_legacy)
}

/// Its pointers are valid as long as the tensor or a copy of it is.
fn view_of(tensor: &Tensor) -> View {
    let array = &tensor.array;
    let [shape, strides] = &array.dlpack;
    View {
        data: if array.values.bits().is_empty() {
            ptr::null_mut()
        } else {
            array.values.bits().as_ptr().cast_mut().cast()
        },
        device: Device { kind: CPU.0, id: CPU.1 },
        ndim: shape.len() as i32,
        data_type: FLOAT32,
        shape: shape.as_ptr().cast_mut(),
        strides: strides.as_ptr().cast_mut(),
        byte_offset: 0,
    }
}

fn lend<'py, M>(
    py: Python<'py>,
    lent: Lent<M>,
    name: &'static CStr,
    release: ffi::PyCapsule_Destructor,
) -> PyResult<Bound<'py, PyCapsule>> {
    let lent = NonNull::from(Box::leak(Box::new(lent)));
    // SAFETY: the pointer is to a leaked box, valid until the deleter takes that back, which happens once: the capsule
    // does it unless it was renamed, and who renames it has that duty from then on. The deleter may run on any thread.
    let capsule = unsafe { PyCapsule::new_with_pointer_and_destructor(py, lent.cast(), name, Some(release)) };
    capsule.inspect_err(|_| {
        // SAFETY: there is no capsule, so the box is still this function's alone.
        drop(unsafe { Box::from_raw(lent.as_ptr()) });
    })
}

/// # Safety
///
/// `managed` is what a capsule of [`lend`] pointed to, and nobody uses it any more.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: the struct is the first in a `Lent` of C layout that was leaked from a box; this is its one deletion.
    drop(unsafe { Box::from_raw(managed.cast::<Lent<M>>()) });
}

/// # Safety
///
/// `capsule` is one of [`versioned`] that goes away.
unsafe extern "C" fn release_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule of its own name holds a pointer of `lend` that nobody took; one that was renamed is left alone.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete::<Versioned>(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// # Safety
///
/// `capsule` is one of [`legacy`] that goes away.
unsafe extern "C" fn release_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: as for a versioned one.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            delete::<Legacy>(ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast());
        }
    }
}

/// Copies the numbers of another library's array, which must be on the CPU, of one dimension and as many. The capsule
/// is not taken, only looked into, so it deletes its array itself.
pub(super) fn read_vector(source: &Bound<'_, PyAny>, values: &mut [f32]) -> PyResult<()> {
    let py = source.py();
    let Some(export) = source.getattr_opt(intern!(py, "__dlpack__"))? else {
        let kind = name_of(source);
        return Err(PyTypeError::new_err(format!(
            "{kind}, where float32 of shape [{}] is wanted",
            values.len()
        )));
    };
    let capsule = export.call0()?.cast_into::<PyCapsule>()?;
    let managed = capsule.pointer_checked(Some(LEGACY))?.cast::<Legacy>();
    // SAFETY: a capsule of this name points to this struct, which is valid as long as the capsule is and nobody takes
    // it, which nobody does who lends it out at the same time.
    let view = unsafe { &managed.as_ref().view };
    if (view.device.kind, view.data_type) != (CPU.0, FLOAT32) {
        let kind = name_of(source);
        return Err(PyValueError::new_err(format!("{kind} that is not of float32 on the CPU")));
    }
    let ndim = usize::try_from(view.ndim).unwrap_or(0);
    let shape: Vec<i64> = if ndim == 0 {
        Vec::new()
    } else {
        // SAFETY: the shape has as many sizes as there are dimensions.
        unsafe { std::slice::from_raw_parts(view.shape, ndim) }.to_vec()
    };
    if shape != [values.len() as i64] {
        let shape: Vec<_> = shape.into_iter().map(|size| size as usize).collect();
        return Err(unlike(source, &shape, values.len()));
    }
    let stride = if view.strides.is_null() {
        1
    } else {
        // SAFETY: where there are strides there is one for the one dimension.
        unsafe { *view.strides as isize }
    };
    for (index, value) in values.iter_mut().enumerate() {
        // SAFETY: the struct says that a float32 lies there for each index below the size; it need not be aligned.
        *value = unsafe {
            let first = view.data.cast::<u8>().add(view.byte_offset as usize).cast::<f32>();
            first.offset(index as isize * stride).read_unaligned()
        };
    }
    Ok(())
}
