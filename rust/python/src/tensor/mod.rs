//! `Tensor`: an array of float32 numbers that other libraries read, and sometimes write, without a copy.
//!
//! DLPack and the buffer protocol share the memory. Each consumer keeps it alive, so no code waits for consumers. They
//! may write from any thread at any time, so each number is an atomic.

mod buffer;
mod dlpack;

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use penstock_frontend::output::FloatArray;
use penstock_frontend::selection;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyDict, PyTuple};

use dlpack::CPU;

use crate::detach::detach;
use crate::errors::Error;

/// Maximum number of dimensions, which is that of the buffer protocol.
const MAX_DIMENSIONS: usize = 64;

/// An array of float32 numbers in C order, which other libraries can read without a copy.
/// `numpy.asarray(tensor)`, `torch.from_dlpack(tensor)` and `memoryview(tensor)` share its memory.
#[pyclass(frozen, eq, module = "penstock", from_py_object)]
#[derive(Clone, Debug)]
pub struct Tensor {
    array: Arc<Array>,
    is_writable: bool,
}

/// The values, and the shapes and strides that the protocols point to.
struct Array {
    values: Arc<FloatArray>,
    /// Shape and strides for DLPack; the strides in values.
    dlpack: [Vec<i64>; 2],
    /// Shape and strides for the buffer protocol; the strides in bytes.
    buffer: [Vec<isize>; 2],
}

impl Tensor {
    /// A read-only tensor.
    pub fn new(shape: Vec<usize>, values: Vec<f32>) -> Self {
        Self::read_only(Arc::new(FloatArray::new(shape, values)))
    }

    /// A read-only tensor that shares `values`.
    pub fn read_only(values: Arc<FloatArray>) -> Self {
        let shape = values.shape().to_vec();
        let strides = strides_of(&shape);
        let dlpack = [&shape, &strides].map(|sizes| sizes.iter().map(|size| *size as i64).collect());
        let to_bytes = |stride: &usize| (stride * size_of::<f32>()) as isize;
        let buffer =
            [shape.iter().map(|size| *size as isize).collect(), strides.iter().map(to_bytes).collect()];
        Self { array: Arc::new(Array { values, dlpack, buffer }), is_writable: false }
    }

    /// A tensor that consumers can write to.
    pub fn writable(shape: Vec<usize>, values: Vec<f32>) -> Self {
        Self { is_writable: true, ..Self::new(shape, values) }
    }

    /// Copies the values to `values`, which has the same length.
    pub fn copy_to(&self, values: &mut [f32]) {
        self.array.values.copy_to(values);
    }

    pub fn into_array(self) -> Arc<FloatArray> {
        Arc::clone(&self.array.values)
    }

    fn shape(&self) -> &[usize] {
        self.array.values.shape()
    }

    fn values(&self) -> Vec<f32> {
        self.array.values.values()
    }
}

/// The strides of an array in C order, in values.
fn strides_of(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension] * shape[dimension].max(1);
    }
    strides
}

/// Reads a one-dimensional float32 array of the length of `values`, by the buffer protocol or DLPack.
pub fn read_vector(source: &Bound<'_, PyAny>, values: &mut [f32]) -> PyResult<()> {
    if let Ok(buffer) = PyBuffer::<f32>::get(source) {
        // A mark of the order of bytes comes first; without one, or with `@` or `=`, it is that of this machine.
        let other_order = if cfg!(target_endian = "little") { b">!".as_slice() } else { b"<" };
        if buffer.format().to_bytes().first().is_some_and(|mark| other_order.contains(mark)) {
            let kind = name_of(source);
            let message = format!("{kind} has the byte order of another machine; use astype(numpy.float32)");
            return Err(PyValueError::new_err(message));
        }
        let is_alike = buffer.dimensions() == 1 && buffer.item_count() == values.len();
        return if is_alike {
            buffer.copy_to_slice(source.py(), values)
        } else {
            Err(unlike(source, buffer.shape(), values.len()))
        };
    }
    dlpack::read_vector(source, values)
}

/// The error for an array of another shape or type.
fn unlike(source: &Bound<'_, PyAny>, shape: &[usize], len: usize) -> PyErr {
    let kind = name_of(source);
    PyValueError::new_err(format!("{kind} of shape {shape:?} is not a float32 array of shape [{len}]"))
}

fn name_of(source: &Bound<'_, PyAny>) -> String {
    source.get_type().name().map_or_else(|_| "something".to_owned(), |name| name.to_string())
}

#[pymethods]
impl Tensor {
    /// A tensor with a copy of `data`, the bytes of the values.
    #[new]
    #[pyo3(signature = (*, shape, data))]
    fn from_bytes(shape: &Bound<'_, PyTuple>, data: &Bound<'_, PyBytes>) -> PyResult<Self> {
        if shape.len() > MAX_DIMENSIONS {
            let given = shape.len();
            let message = format!("shape has {given} dimensions; it must have at most {MAX_DIMENSIONS}");
            return Err(PyValueError::new_err(message));
        }
        let sizes = shape.iter().map(|size| size.extract()).collect::<PyResult<Vec<usize>>>()?;
        let (chunks, rest) = data.as_bytes().as_chunks();
        // Strides are computed in bytes, with a size of at least 1 in each dimension.
        let span = sizes.iter().try_fold(size_of::<f32>(), |span, size| span.checked_mul((*size).max(1)));
        let is_addressable = span.is_some_and(|span| isize::try_from(span).is_ok());
        if !is_addressable || sizes.iter().product::<usize>() != chunks.len() || !rest.is_empty() {
            let bytes = data.as_bytes().len();
            return Err(PyValueError::new_err(format!(
                "data has {bytes} bytes, which is not a float32 array of shape {sizes:?}"
            )));
        }
        Ok(Self::new(sizes, chunks.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()))
    }

    /// The size of each dimension, the slowest first.
    #[getter]
    #[pyo3(name = "shape")]
    fn shape_tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape())
    }

    /// The mean or the last one of hidden states.
    #[pyo3(signature = (pooling, *, normalize = false, dimensions = None))]
    fn pooled(
        &self,
        py: Python<'_>,
        pooling: &str,
        normalize: bool,
        dimensions: Option<usize>,
    ) -> Result<Self, Error> {
        let values = &self.array.values;
        let pooled = detach(py, || selection::pool(values, pooling, normalize, dimensions))?;
        let pooled = pooled.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self::read_only(Arc::new(pooled)))
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() || dl_device.is_some_and(|device| device != CPU) {
            return Err(PyBufferError::new_err(
                "the tensor is in CPU memory; stream must be None and dl_device the CPU",
            ));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let is_copied = copy == Some(true);
        let shared =
            if is_copied { Self::writable(self.shape().to_vec(), self.values()) } else { self.clone() };
        if is_versioned {
            dlpack::versioned(py, shared, is_copied)
        } else if shared.is_writable {
            dlpack::legacy(py, shared)
        } else {
            Err(PyBufferError::new_err(
                "the tensor is read-only, which needs DLPack 1.0; pass max_version=(1, 0), or copy=True",
            ))
        }
    }

    #[allow(clippy::unused_self, reason = "the protocol's")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        CPU
    }

    /// # Safety
    ///
    /// `view` is valid for writes.
    unsafe fn __getbuffer__(this: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: the interpreter passes a valid view.
        unsafe { buffer::fill(this, view, flags) }
    }

    fn __repr__(&self) -> String {
        let sizes: Vec<_> = self.shape().iter().map(ToString::to_string).collect();
        let comma = if sizes.len() == 1 { "," } else { "" };
        format!("<Tensor of shape ({}{comma})>", sizes.join(", "))
    }

    /// The hash of the shape: hashing the values could take long, and values of a writable tensor change.
    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        self.shape_tuple(py)?.hash()
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let bytes: Vec<u8> = self.values().into_iter().flat_map(f32::to_ne_bytes).collect();
        let arguments = PyDict::new(py);
        arguments.set_item("shape", self.shape_tuple(py)?)?;
        arguments.set_item("data", PyBytes::new(py, &bytes))?;
        Ok((PyTuple::empty(py), arguments))
    }
}

impl PartialEq for Tensor {
    fn eq(&self, other: &Self) -> bool {
        self.array.values == other.array.values
    }
}

impl fmt::Debug for Array {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.values.fmt(formatter)
    }
}

impl<'py> IntoPyObject<'py> for &Tensor {
    type Target = Tensor;
    type Output = Bound<'py, Tensor>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        Bound::new(py, self.clone())
    }
}
