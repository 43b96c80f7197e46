//! [`Compute`]: the operations of a step, about a dozen of the size of a language model's layer.

use std::ops::Range;

use penstock_types::{AttentionParams, Epilogue, HeadShape};

use super::load::Load;
use super::sample::Sample;
use super::step::{StepInputs, StepRows};
use crate::error::DeviceError;

/// The updates of a product: those that the adapters of some rows of a step have for a matrix.
pub struct AdapterUpdates<'a, S, A> {
    /// The uploaded step, which names the adapters of its rows.
    pub step: S,
    /// The rows of the product.
    pub rows: StepRows,
    /// The number of the matrix among those of the model.
    pub matrix: u32,
    /// The loaded adapters.
    pub adapters: &'a mut A,
}

/// The norms of the heads of a layer.
pub struct HeadNorms<'a, V> {
    /// The weight of query heads.
    pub query: &'a V,
    /// The weight of key heads.
    pub key: &'a V,
    /// The number that is added to the mean square.
    pub epsilon: f32,
}

/// The heads that a layer has projected its rows to.
pub struct LayerHeads<'a, V> {
    /// The heads of a row, side by side: query, key, value.
    pub shape: HeadShape,
    /// The norms of query and key, if the model has them.
    pub norms: Option<HeadNorms<'a, V>>,
    /// The number of the layer.
    pub layer: usize,
}

/// The attention of a layer.
pub struct LayerAttention<'a, C> {
    /// The heads of a row.
    pub shape: HeadShape,
    /// The scale, the window and the cap of the scores.
    pub params: AttentionParams,
    /// The keys and values of all layers.
    pub cache: &'a C,
    /// The number of the layer.
    pub layer: usize,
}

/// The operations of a step.
pub trait Compute: Load + Sample {
    /// The inputs of a step on the device.
    type Step<'a>: Copy;

    /// Whether an output row never depends on the other rows; known when the operations are
    /// [prepared](Load::prepare).
    fn is_deterministic(&self) -> bool;

    /// Prepares the calling thread, which makes all later calls. Called again after code of the user has run in it.
    fn bind_thread(&mut self);

    /// Checks the inputs of a step and copies them to the device. Later operations take them as valid. An operand of
    /// integer codes has its rows as float32, too, if a row of the step has an adapter.
    fn upload<'a>(
        &mut self,
        inputs: &'a StepInputs,
        rope: &mut Self::Rope,
        slots: &Self::Slots,
        cache: &Self::Cache,
        adapters: Option<&Self::Adapters>,
    ) -> Result<Self::Step<'a>, DeviceError>;

    /// Computes `out[row] = table[token of row]`. A token `FOLLOWS | slot` is the one sampled last for that slot.
    fn embed(
        &mut self,
        step: Self::Step<'_>,
        slots: &Self::Slots,
        table: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Computes `out[row] = x[row] / sqrt(mean(x[row]^2) + epsilon) * weight` for the first `rows` rows.
    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Computes the same in the form that `reader` reads.
    fn rms_norm_for(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// Computes `out[i] = weight * x[rows[i]]`, then the epilogue. `x` was written for `weight`.
    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &Self::Operand,
        weight: &Self::Matrix,
        epilogue: Epilogue<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Adds `updates`, times the rows of `x` before those become integer codes, to the rows of `out`, which
    /// [`linear`](Self::linear) computed with `weight`.
    fn add_adapters(
        &mut self,
        updates: AdapterUpdates<'_, Self::Step<'_>, Self::Adapters>,
        x: &Self::Operand,
        weight: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Computes [`linear`](Self::linear) of the first `count` rows of `x`, then [`add_adapters`](Self::add_adapters).
    /// A device that starts its threads for each operation makes one of the two, with the same results.
    fn linear_with_adapters(
        &mut self,
        count: usize,
        x: &Self::Operand,
        weight: &Self::Matrix,
        epilogue: Epilogue<&Self::Vector>,
        updates: AdapterUpdates<'_, Self::Step<'_>, Self::Adapters>,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        self.linear(0..count, x, weight, epilogue, out)?;
        self.add_adapters(updates, x, weight, out)
    }

    /// Normalises the heads of q and k in the rows of `qkv` if `heads` has norms, rotates them in place, multiplies q
    /// by [`StepInputs::query_scales`], and writes k and v into the layer's cache.
    fn rope_write_kv(
        &mut self,
        step: Self::Step<'_>,
        rope: &Self::Rope,
        heads: LayerHeads<'_, Self::Vector>,
        qkv: &mut Self::Buffer,
        cache: &mut Self::Cache,
    ) -> Result<(), DeviceError>;

    /// Computes causal attention of the query part of every row of `qkv` over its sequence's cache, in the form that
    /// `reader` reads. The contents of `qkv` are lost.
    fn attention(
        &mut self,
        reader: &Self::Matrix,
        step: Self::Step<'_>,
        attention: LayerAttention<'_, Self::Cache>,
        qkv: &mut Self::Buffer,
        scratch: &mut Self::Scratch,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// Computes `out[row] = silu(gate) * up`, where row `row` of `gate_up` holds `width` gates, then `width` ups, in
    /// the form that `reader` reads.
    fn silu_mul(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        width: usize,
        gate_up: &Self::Buffer,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// Copies the output rows: `out[i] = x[output_rows[i]]`, rows of `width`.
    fn gather(
        &mut self,
        step: Self::Step<'_>,
        width: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Copies the output rows of an operand that was written for `reader`.
    fn gather_operand(
        &mut self,
        reader: &Self::Matrix,
        step: Self::Step<'_>,
        x: &Self::Operand,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// Begins to compute all earlier calls: those of a step that is sampled later, or that has failed.
    fn flush(&mut self) -> Result<(), DeviceError>;
}
