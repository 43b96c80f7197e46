//! An array of float32 values that readers in other libraries can share.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// An array of float32 values in C order.
///
/// A library that borrows the memory can write to it at any time, even if it is told not to, so each value is an
/// atomic. All accesses are relaxed: the values order nothing.
pub struct FloatArray {
    bits: Vec<AtomicU32>,
    shape: Vec<usize>,
}

impl FloatArray {
    /// Takes over the allocation of `values`. The product of `shape` is their number.
    pub fn new(shape: Vec<usize>, values: Vec<f32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "the shape has as many values");
        let bits = values.into_iter().map(|value| AtomicU32::new(value.to_bits())).collect();
        Self { bits, shape }
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn bits(&self) -> &[AtomicU32] {
        &self.bits
    }

    /// Copies the values to `values`, which has the same length.
    pub fn copy_to(&self, values: &mut [f32]) {
        self.copy_from(0, values);
    }

    /// Copies the values from `start` on to `values`, which has their number.
    pub fn copy_from(&self, start: usize, values: &mut [f32]) {
        for (value, bits) in values.iter_mut().zip(&self.bits[start..]) {
            *value = f32::from_bits(bits.load(Ordering::Relaxed));
        }
    }

    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.bits.len()];
        self.copy_to(&mut values);
        values
    }
}

impl PartialEq for FloatArray {
    /// Compares the bits, so that NaN equals itself.
    fn eq(&self, other: &Self) -> bool {
        let bits = |array: &Self| array.values().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        self.shape == other.shape && (std::ptr::eq(self, other) || bits(self) == bits(other))
    }
}

impl fmt::Debug for FloatArray {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FloatArray").field("shape", &self.shape).finish_non_exhaustive()
    }
}
