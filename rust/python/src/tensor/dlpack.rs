//! The DLPack protocol: a capsule with a pointer to a struct that describes an array.
//!
//! A consumer renames the capsule and calls the struct's deleter when it is done. The destructor of a capsule that was
//! not consumed calls the deleter. The layouts are those of `dlpack.h`: the versioned one of DLPack 1.0, and the older
//! one, which has no flag for read-only arrays.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use super::{Tensor, name_of, unlike};

/// The device type and id of all tensors.
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

/// The target of a capsule's pointer: DLPack's struct first, then the tensor that keeps the array alive. It contains no
/// Python objects, so any thread may drop it, attached or not.
#[repr(C)]
struct Exported<M> {
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
    export(py, Exported { managed, _tensor: tensor }, VERSIONED, release_versioned)
}

/// The tensor in a capsule of DLPack before 1.0.
pub(super) fn legacy(py: Python<'_>, tensor: Tensor) -> PyResult<Bound<'_, PyCapsule>> {
    let (view, deleter) = (view_of(&tensor), Some(delete::<Legacy> as unsafe extern "C" fn(*mut Legacy)));
    let managed = Legacy { view, owner: ptr::null_mut(), deleter };
    export(py, Exported { managed, _tensor: tensor }, LEGACY, release_legacy)
}

/// DLPack's description of a tensor. Its pointers are valid as long as the tensor or a clone of it exists.
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

fn export<'py, M>(
    py: Python<'py>,
    exported: Exported<M>,
    name: &'static CStr,
    release: ffi::PyCapsule_Destructor,
) -> PyResult<Bound<'py, PyCapsule>> {
    let exported = NonNull::from(Box::leak(Box::new(exported)));
    // SAFETY: the pointer is to a leaked box, valid until the deleter frees it. The deleter is called once, on any
    // thread: by the capsule's destructor, or by the consumer that has renamed the capsule.
    let capsule =
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, exported.cast(), name, Some(release)) };
    capsule.inspect_err(|_| {
        // SAFETY: there is no capsule, so only this function has the pointer.
        drop(unsafe { Box::from_raw(exported.as_ptr()) });
    })
}

/// # Safety
///
/// `managed` is the pointer of a capsule of [`export`], and is not used afterwards.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: the struct is the first field of an `Exported` of C layout that was leaked from a box, and this is the
    // only call that frees it.
    drop(unsafe { Box::from_raw(managed.cast::<Exported<M>>()) });
}

/// # Safety
///
/// `capsule` was made by [`versioned`] and is being destroyed.
unsafe extern "C" fn release_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that still has this name was not consumed, and its pointer is from `export`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete::<Versioned>(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// # Safety
///
/// `capsule` was made by [`legacy`] and is being destroyed.
unsafe extern "C" fn release_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `release_versioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            delete::<Legacy>(ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast());
        }
    }
}

/// Copies the values of another library's array, which must be one-dimensional, of this length and on the CPU. The
/// capsule is not consumed, so its destructor frees the array.
pub(super) fn read_vector(source: &Bound<'_, PyAny>, values: &mut [f32]) -> PyResult<()> {
    let py = source.py();
    let Some(export) = source.getattr_opt(intern!(py, "__dlpack__"))? else {
        let kind = name_of(source);
        return Err(PyTypeError::new_err(format!(
            "{kind} is not a float32 array of shape [{}]",
            values.len()
        )));
    };
    let capsule = export.call0()?.cast_into::<PyCapsule>()?;
    let managed = capsule.pointer_checked(Some(LEGACY))?.cast::<Legacy>();
    // SAFETY: a capsule of this name points to this struct, which is valid while the capsule exists and is not
    // consumed. The capsule was just made for this function, so there is no other consumer.
    let view = unsafe { &managed.as_ref().view };
    if (view.device.kind, view.data_type) != (CPU.0, FLOAT32) {
        let kind = name_of(source);
        return Err(PyValueError::new_err(format!("{kind} is not a float32 array on the CPU")));
    }
    let ndim = usize::try_from(view.ndim).unwrap_or(0);
    let shape: Vec<i64> = if ndim == 0 {
        Vec::new()
    } else {
        // SAFETY: the shape has one size for each dimension.
        unsafe { std::slice::from_raw_parts(view.shape, ndim) }.to_vec()
    };
    if shape != [values.len() as i64] {
        let shape: Vec<_> = shape.into_iter().map(|size| size as usize).collect();
        return Err(unlike(source, &shape, values.len()));
    }
    let stride = if view.strides.is_null() {
        1
    } else {
        // SAFETY: if there are strides, there is one for the only dimension.
        unsafe { *view.strides as isize }
    };
    for (index, value) in values.iter_mut().enumerate() {
        // SAFETY: by the protocol a float32, aligned or not, is readable there for each index below the size.
        *value = unsafe {
            let first = view.data.cast::<u8>().add(view.byte_offset as usize).cast::<f32>();
            first.offset(index as isize * stride).read_unaligned()
        };
    }
    Ok(())
}
