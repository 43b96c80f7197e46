//! `Tensor`: an array of numbers of ours that other libraries read where it lies.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// See `_core.pyi`. Copies share their values.
#[pyclass(frozen, eq, module = "penstock", from_py_object)]
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    values: Arc<[f32]>,
}

impl Tensor {
    /// The values, the last dimension's next to each other.
    pub fn new(shape: Vec<usize>, values: impl Into<Arc<[f32]>>) -> Self {
        let values = values.into();
        assert_eq!(shape.iter().product::<usize>(), values.len(), "values are as many as the shape says");
        Self { shape, values }
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

#[pymethods]
impl Tensor {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }
}
