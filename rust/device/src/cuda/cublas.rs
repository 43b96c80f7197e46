//! Products by cuBLASLt, which may have other bits in another batch. Kernels of `cuda/` compute products of few rows,
//! those that the library has no algorithm for, and all products of codes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use penstock_cuda::{
    CUBLAS_ALIGNMENT, Context, Cublas, CublasHandle, DevicePointer, MatrixProduct, ProductShape,
};

use super::{lost, start};
use crate::arena::Region;
use crate::backend::DeviceError;

/// Bytes of the workspace of algorithms: what NVIDIA recommends for compute capability 9.0.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;
/// Products that are kept. A step has fewer than ten shapes for its number of rows.
const MOST_PRODUCTS: usize = 4096;

/// The library, and the products of the shapes so far.
pub(super) struct CublasProducts {
    handle: Arc<CublasHandle>,
    /// `None` before it is allocated.
    pub workspace: Option<Region>,
    /// `None` for shapes without an algorithm.
    products: RefCell<HashMap<ProductShape, Option<Arc<MatrixProduct>>>>,
}

impl CublasProducts {
    pub fn new(library: Cublas, context: &Arc<Context>) -> Result<Self, DeviceError> {
        let handle = CublasHandle::new(library, context).map_err(start)?;
        Ok(Self { handle, workspace: None, products: RefCell::default() })
    }

    /// The product of a shape with operands at these addresses; `None` if the library does not compute it.
    pub fn get(
        &self,
        shape: ProductShape,
        addresses: &[DevicePointer],
    ) -> Result<Option<Arc<MatrixProduct>>, DeviceError> {
        let is_aligned = |bytes: u64| bytes.is_multiple_of(CUBLAS_ALIGNMENT as u64);
        let row_bytes = [2 * shape.inner, 4 * shape.pitch].map(|bytes| bytes as u64);
        if !addresses.iter().map(|address| address.0).chain(row_bytes).all(is_aligned) {
            return Ok(None);
        }
        let mut products = self.products.borrow_mut();
        if let Some(product) = products.get(&shape) {
            return Ok(product.clone());
        }
        if products.len() >= MOST_PRODUCTS {
            products.clear();
        }
        let product = self.handle.product(shape, WORKSPACE_BYTES).map_err(lost)?.map(Arc::new);
        products.insert(shape, product.clone());
        Ok(product)
    }
}
