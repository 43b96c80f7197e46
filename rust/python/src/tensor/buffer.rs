//! The buffer protocol: a view points into the tensor, which it keeps alive.

use std::ffi::{CStr, c_int};
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::Tensor;

/// float32 in the notation of the `struct` module.
const FORMAT: &CStr = c"f";
const ITEM_BYTES: isize = size_of::<f32>() as isize;

/// Fills the fields of `view` that `flags` request.
///
/// # Safety
///
/// `view` is valid for writes.
pub(super) unsafe fn fill(
    tensor: Bound<'_, Tensor>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let has = |flag: c_int| flags & flag == flag;
    let Tensor { array, is_writable } = tensor.get();
    let [shape, strides] = &array.buffer;
    let refusal = if has(ffi::PyBUF_WRITABLE) && !is_writable {
        Some("the tensor is read-only")
    } else if has(ffi::PyBUF_F_CONTIGUOUS) && shape.len() > 1 {
        Some("the tensor is in C order, not in Fortran order")
    } else {
        None
    };
    let mut filled = ffi::Py_buffer::new();
    if let Some(refusal) = refusal {
        // SAFETY: `view` is valid for writes. Without an object it needs no release.
        unsafe { view.write(filled) };
        return Err(PyBufferError::new_err(refusal));
    }
    // All pointers of the protocol are mutable; a consumer writes only if it requested a writable view.
    filled.buf = array.values.bits().as_ptr().cast_mut().cast();
    filled.len = array.values.bits().len() as isize * ITEM_BYTES;
    filled.itemsize = ITEM_BYTES;
    filled.readonly = c_int::from(!is_writable);
    filled.ndim = shape.len() as c_int;
    filled.format = if has(ffi::PyBUF_FORMAT) { FORMAT.as_ptr().cast_mut() } else { ptr::null_mut() };
    filled.shape = if has(ffi::PyBUF_ND) { shape.as_ptr().cast_mut() } else { ptr::null_mut() };
    filled.strides = if has(ffi::PyBUF_STRIDES) { strides.as_ptr().cast_mut() } else { ptr::null_mut() };
    filled.obj = tensor.into_ptr();
    // SAFETY: `view` is valid for writes. It owns a reference to the tensor. Neither the tensor's array nor the array's
    // vectors are ever replaced, so pointers into them are valid until the view is released. Consumers only read shape,
    // strides and format, by the protocol; the values are atomics, so writing to them is sound.
    unsafe { view.write(filled) };
    Ok(())
}
