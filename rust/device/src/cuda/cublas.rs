//! Products by cuBLASLt, which may have other bits in another batch. Kernels of `cuda/` compute products of few rows,
//! those that the library has no algorithm for, and all products of quantised weights.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;

use penstock_cuda::{
    CUBLAS_ALIGNMENT, Context, Cublas, CublasHandle, CudaError, DeviceMemory, MatrixProduct, ProductOperands,
    ProductShape, Stream,
};

use crate::arena::Region;

/// Bytes of the workspace of algorithms: what NVIDIA recommends for compute capability 9.0. Other devices need less.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;
/// Products that are kept: about 1 KB of the host each, and a step has fewer than ten shapes for its number of rows.
const MOST_PRODUCTS: usize = 4096;
/// Rows of the products of [`CublasProducts::try_shapes`]: the fewest that kernels for vectors do not compute.
const TRIED_ROWS: usize = 9;

/// The columns of a matrix of 16 bits, its rows, and whether it is bfloat16.
pub(super) type MatrixShape = (usize, usize, bool);

/// Whether the library multiplies matrices with this number of columns.
pub(super) fn is_aligned(columns: usize) -> bool {
    (2 * columns).is_multiple_of(CUBLAS_ALIGNMENT)
}

/// The library, and the products of the shapes so far.
pub(super) struct CublasProducts {
    handle: Arc<CublasHandle>,
    /// `None` before it is allocated.
    pub workspace: Option<Region>,
    /// `None` for shapes that kernels compute.
    products: RefCell<HashMap<ProductShape, Option<Arc<MatrixProduct>>>>,
    /// After an error, kernels compute all shapes that are new.
    has_failed: Cell<bool>,
}

impl CublasProducts {
    pub fn new(library: Cublas, context: &Arc<Context>) -> Result<Self, CudaError> {
        let handle = CublasHandle::new(library, context)?;
        Ok(Self { handle, workspace: None, products: RefCell::default(), has_failed: Cell::new(false) })
    }

    /// Computes a small product of each shape; false if the library has no algorithm for any. So an error of the
    /// library comes before a model is loaded, and memory for its code is taken before the rest is measured; products
    /// of other numbers of rows may load more.
    pub fn try_shapes(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        shapes: &[MatrixShape],
    ) -> Result<bool, CudaError> {
        let most = |size: fn(&MatrixShape) -> usize| shapes.iter().map(size).max().unwrap_or_default();
        let sizes = [
            2 * most(|(columns, rows, _)| columns * rows),
            2 * TRIED_ROWS * most(|(columns, ..)| *columns),
            4 * TRIED_ROWS * most(|(_, rows, _)| *rows),
            WORKSPACE_BYTES,
        ];
        let mut memory = Vec::new();
        for bytes in sizes {
            memory.push(DeviceMemory::new(context, bytes)?);
        }
        let [w, x, out, workspace] = [0, 1, 2, 3].map(|index: usize| memory[index].pointer());
        let launch = || {
            for (memory, bytes) in memory.iter().zip(sizes) {
                // SAFETY: the memory has as many bytes, and lives until the stream has been waited for.
                unsafe { stream.fill(memory.pointer(), 0, bytes) }?;
            }
            let mut has_any = false;
            let operands = ProductOperands { x, w, bias: out, out, workspace };
            for &(inner, outputs, is_bf16) in shapes {
                let shape = ProductShape {
                    is_bf16,
                    rows: TRIED_ROWS,
                    outputs,
                    inner,
                    pitch: outputs,
                    alignment: alignment_of(4 * outputs as u64),
                    accumulates: false,
                    has_bias: false,
                };
                if let Some(product) = self.handle.product(shape, WORKSPACE_BYTES)? {
                    // SAFETY: the memory is as large as the largest shape requires, and lives as above.
                    unsafe { product.launch(stream, &operands) }?;
                    has_any = true;
                }
            }
            Ok(has_any)
        };
        let launched = launch();
        stream.synchronize().and(launched)
    }

    /// The product of a shape; `None` if kernels compute it. A new one is not made while a stream is captured, when the
    /// library may refuse that.
    pub fn get(&self, shape: ProductShape, is_capturing: bool) -> Option<Arc<MatrixProduct>> {
        let mut products = self.products.borrow_mut();
        if let Some(product) = products.get(&shape) {
            return product.clone();
        }
        if is_capturing || self.has_failed.get() {
            return None;
        }
        if products.len() >= MOST_PRODUCTS {
            products.clear();
        }
        match self.handle.product(shape, WORKSPACE_BYTES) {
            Ok(product) => products.entry(shape).insert_entry(product.map(Arc::new)).get().clone(),
            Err(error) => {
                self.fail(&error);
                None
            }
        }
    }

    /// Leaves a shape, and all new ones, to kernels after an error.
    pub fn refuse(&self, shape: ProductShape, error: &CudaError) {
        self.products.borrow_mut().insert(shape, None);
        self.fail(error);
    }

    fn fail(&self, error: &dyn Display) {
        if !self.has_failed.replace(true) {
            log::warn!("kernels compute new products instead of cuBLASLt: {error}");
        }
    }
}

/// The alignment of addresses and pitches, given as one number with the bits of all, in bytes.
pub(super) fn alignment_of(bits: u64) -> usize {
    1 << (bits | CUBLAS_ALIGNMENT as u64).trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_that_of_the_least_aligned_number() {
        assert_eq!([0, 16, 4096].map(alignment_of), [16; 3]);
        assert_eq!([4, 2036, 4096 | 12, 8, 4096 | 24].map(alignment_of), [4, 4, 4, 8, 8]);
    }
}
