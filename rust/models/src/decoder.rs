//! The decoder: embedding, layers of attention and feed-forward, norm, head. Written once for every family and device.
//!
//! Shapes are in the margins: t = rows (tokens) of the step, o = output rows, h = hidden size,
//! i = intermediate size, v = vocabulary.

use std::ops::Range;

use penstock_device::{
    AdapterSpec, AdapterUpdates, Allocation, Backend, Compute, DeviceError, HeadNorms, LayerAttention,
    LayerHeads, Load, StepInputs, StepRows, StepSpec,
};
use penstock_types::{AttentionParams, AttentionRow, Epilogue};

use crate::blocks::{Attention, Layer, Linear, Mlp};
use crate::config::ModelConfig;
use crate::model::Model;
use crate::rotations::{ExtraRotations, RopeTable, logn_scale};

/// A loaded model. Immutable; the caller owns the cache and the workspace.
pub struct Decoder<B: Backend> {
    config: ModelConfig,
    weights: Model<B::Matrix, B::Vector>,
}

/// Activations of one step and all other state of the device but weights and cache, allocated once for the largest
/// step.
pub struct Workspace<B: Backend> {
    hidden: B::Buffer,
    /// The rows that the next product reads.
    operand: B::Operand,
    /// Query, key and value, then gate and up.
    projected: B::Buffer,
    /// Residual stream and attention output of the output rows.
    output_hidden: B::Buffer,
    output_attended: B::Operand,
    /// Whether the output rows of the last step are all its rows: their residual stream is `hidden`.
    outputs_all: bool,
    /// The last hidden states of the output rows, after [`Decoder::hidden_states`]; their embeddings after
    /// [`Decoder::embeddings`].
    pub hidden_states: B::Buffer,
    /// The output of the last [`Decoder::logits`].
    pub logits: B::Buffer,
    /// Memory that operations need while they run.
    pub scratch: B::Scratch,
    /// The sampling state of each sequence.
    pub slots: B::Slots,
    /// The adapters of the rows, if there can be any.
    pub adapters: Option<B::Adapters>,
    rope: B::Rope,
}

impl<B: Backend> Workspace<B> {
    /// Allocates the workspace of steps up to the size of `spec`.
    pub fn new(
        backend: &mut B,
        config: &ModelConfig,
        spec: &StepSpec,
        adapters: Option<&AdapterSpec>,
    ) -> Result<Self, DeviceError> {
        let [hidden, projected, output_hidden, hidden_states, logits] = buffer_lens(config, spec);
        let [operand, output_attended] = operand_widths(config);
        let rows = spec.tokens;
        Ok(Self {
            hidden: backend.allocate(hidden)?,
            operand: backend.allocate_operand(rows, operand)?,
            projected: backend.allocate(projected)?,
            output_hidden: backend.allocate(output_hidden)?,
            output_attended: backend.allocate_operand(rows, output_attended)?,
            outputs_all: false,
            hidden_states: backend.allocate(hidden_states)?,
            logits: backend.allocate(logits)?,
            scratch: backend.allocate_scratch(spec)?,
            slots: backend.allocate_slots(spec)?,
            adapters: adapters.map(|adapters| backend.allocate_adapters(adapters, spec)).transpose()?,
            rope: backend.load_rope(&RopeTable::new(&config.rope, spec.positions), spec)?,
        })
    }

    /// Number of bytes that [`new`](Self::new) allocates.
    pub fn bytes(backend: &B, config: &ModelConfig, step: &StepSpec, adapters: Option<&AdapterSpec>) -> u64 {
        let buffers = buffer_lens(config, step).map(Allocation::Floats);
        let operands =
            operand_widths(config).map(|columns| Allocation::Operand { rows: step.tokens, columns });
        let positions = config.rope.table_len(step.positions);
        let others =
            [Allocation::Scratch(step), Allocation::Slots(step), Allocation::Rope { positions, step }];
        let adapters = adapters.map(|adapters| Allocation::Adapters { adapters, step });
        let all = buffers.into_iter().chain(operands).chain(others).chain(adapters);
        all.map(|allocation| backend.bytes(allocation)).fold(0, u64::saturating_add)
    }
}

/// Values of each buffer, in the order of the fields.
fn buffer_lens(config: &ModelConfig, spec: &StepSpec) -> [usize; 5] {
    let (hidden, heads, wide) = (config.hidden_size, config.heads, config.widest_mlp());
    let row = |width: usize| spec.tokens.saturating_mul(width);
    [
        row(hidden),
        row(heads.qkv_width().max(2 * wide)),
        row(hidden),
        row(hidden),
        spec.logits_rows.saturating_mul(config.vocabulary_size),
    ]
}

/// Columns of each operand, in the order of the fields.
fn operand_widths(config: &ModelConfig) -> [usize; 2] {
    let query = config.heads.query_width();
    [config.hidden_size.max(query).max(config.widest_mlp()), query]
}

impl<B: Backend> Decoder<B> {
    pub(crate) fn new(config: ModelConfig, weights: Model<B::Matrix, B::Vector>) -> Self {
        Self { config, weights }
    }

    /// The configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Appends one sequence's rows to a step: its tokens at positions from `start`, their rotations, the scales of
    /// their queries, and where their keys and values are written. The sequence's block table must already be the last
    /// `num_blocks` entries of `inputs.blocks`.
    pub fn push_sequence(
        &self,
        inputs: &mut StepInputs,
        tokens: impl ExactSizeIterator<Item = u32>,
        start: usize,
        prompt_len: usize,
        num_blocks: usize,
        block_size: usize,
    ) {
        let (first_row, num_tokens) = (inputs.tokens.len(), tokens.len());
        let blocks = inputs.blocks.len() - num_blocks..inputs.blocks.len();
        inputs.tokens.extend(tokens);
        let mut extra = ExtraRotations::new(&self.config.rope);
        if let Some(logn_len) = self.config.logn_len {
            let scales = (start..start + num_tokens).map(|position| logn_scale(position, logn_len));
            inputs.query_scales.extend(scales);
        }
        for position in start..start + num_tokens {
            inputs.positions.push(extra.rotation(position, prompt_len, &mut inputs.extra_rotations));
            inputs.write_blocks.push(inputs.blocks[blocks.start + position / block_size]);
            inputs.write_offsets.push((position % block_size) as u32);
        }
        inputs.sequences.push(AttentionRow {
            first_query: first_row,
            num_queries: num_tokens,
            start,
            blocks,
        });
    }

    /// Computes the step: keys and values of every row go to `cache`; the last hidden states of the output rows stay in
    /// `workspace`, for [`logits`](Self::logits) and [`hidden_states`](Self::hidden_states).
    pub fn forward(
        &self,
        backend: &mut B,
        inputs: &StepInputs,
        cache: &mut B::Cache,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        self.forward_through(&self.weights.layers, backend, inputs, cache, workspace)
    }

    /// The step through at most `num_layers` layers and the final norm: all operations of [`forward`](Self::forward) in
    /// a fraction of its time. For the warm-up; the results are meaningless.
    pub fn forward_through_some(
        &self,
        num_layers: usize,
        backend: &mut B,
        inputs: &StepInputs,
        cache: &mut B::Cache,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        // A window would hide the far end of a long context.
        let layers = &self.weights.layers;
        let reach = |index: &usize| layers[*index].attention.window.unwrap_or(usize::MAX);
        let farthest = (0..layers.len()).max_by_key(reach);
        let num_layers = num_layers.min(layers.len());
        let first = farthest.unwrap_or(0).min(layers.len() - num_layers);
        self.forward_through(&layers[first..][..num_layers], backend, inputs, cache, workspace)
    }

    fn forward_through(
        &self,
        layers: &[Layer<B::Matrix, B::Vector>],
        backend: &mut B,
        inputs: &StepInputs,
        cache: &mut B::Cache,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        let (tokens, outputs) = (inputs.tokens.len(), inputs.output_rows.len());
        let outputs_all = inputs.output_rows.iter().copied().eq(0..tokens as u32);
        let (config, w) = (&self.config, workspace);
        let step = backend.upload(inputs, &mut w.rope, &w.slots, cache, w.adapters.as_ref())?;
        let adapters = w.adapters.as_mut().filter(|_| !inputs.adapters.is_empty());
        let mut adapted = Adapted::<B> { step, adapters };
        let epsilon = config.norm_epsilon;
        let scale = 1.0 / (config.heads.head_dim as f32).sqrt();
        backend.embed(step, &w.slots, &self.weights.embedding, &mut w.hidden)?; // [t, h]
        for (index, layer) in layers.iter().enumerate() {
            let Attention { qkv, qk_norm, output, window } = &layer.attention;
            let norm = &layer.attention_norm;
            backend.rms_norm_for(&qkv.weight, tokens, &w.hidden, norm, epsilon, &mut w.operand)?;
            let updates = adapted.updates(StepRows::All, qkv.number);
            product(backend, tokens, &w.operand, qkv, updates, &mut w.projected)?; // [t, q + 2 kv]
            let norms = qk_norm.as_ref().map(|(query, key)| HeadNorms { query, key, epsilon });
            let heads = LayerHeads { shape: config.heads, norms, layer: index };
            backend.rope_write_kv(step, &w.rope, heads, &mut w.projected, cache)?;
            let last = index + 1 == layers.len();
            if last && outputs == 0 {
                return Ok(()); // a chunk in the middle of a prompt: only its keys and values are needed
            }
            let params = AttentionParams { scale, window: *window, softcap: None };
            let attention = LayerAttention { shape: config.heads, params, cache: &*cache, layer: index };
            let (reader, rows, attended) = (&output.weight, &mut w.projected, &mut w.operand);
            backend.attention(reader, step, attention, rows, &mut w.scratch, attended)?; // [t, q]
            // After the last attention rows are independent: continue with the output rows, unless these are all rows.
            let is_reduced = last && !outputs_all;
            let of_step = if is_reduced { StepRows::Outputs } else { StepRows::All };
            let (rows, hidden, attended) = if is_reduced {
                backend.gather(step, config.hidden_size, &w.hidden, &mut w.output_hidden)?; // [o, h]
                backend.gather_operand(reader, step, &w.operand, &mut w.output_attended)?;
                (outputs, &mut w.output_hidden, &w.output_attended)
            } else {
                (tokens, &mut w.hidden, &w.operand)
            };
            let updates = adapted.updates(of_step, output.number);
            accumulate(backend, rows, attended, output, updates, hidden)?;
            let Mlp { gate_up, down, width } = &layer.mlp;
            let (norm, operand) = (&layer.mlp_norm, &mut w.operand);
            backend.rms_norm_for(&gate_up.weight, rows, hidden, norm, epsilon, operand)?;
            let updates = adapted.updates(of_step, gate_up.number);
            product(backend, rows, &w.operand, gate_up, updates, &mut w.projected)?; // [t, 2 i]
            backend.silu_mul(&down.weight, rows, *width, &w.projected, &mut w.operand)?; // [t, i]
            let updates = adapted.updates(of_step, down.number);
            accumulate(backend, rows, &w.operand, down, updates, hidden)?;
        }
        w.outputs_all = outputs_all;
        let hidden = if outputs_all { &w.hidden } else { &w.output_hidden };
        backend.rms_norm_for(self.head(), outputs, hidden, &self.weights.norm, epsilon, &mut w.operand) // [o, h]
    }

    /// Writes the embeddings of the output rows' tokens to `workspace.hidden_states`, before
    /// [`forward`](Self::forward).
    pub fn embeddings(
        &self,
        backend: &mut B,
        inputs: &StepInputs,
        cache: &mut B::Cache,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        let w = workspace;
        let step = backend.upload(inputs, &mut w.rope, &w.slots, cache, w.adapters.as_ref())?;
        backend.embed(step, &w.slots, &self.weights.embedding, &mut w.hidden)?;
        backend.gather(step, self.config.hidden_size, &w.hidden, &mut w.hidden_states)
    }

    fn head(&self) -> &B::Matrix {
        self.weights.head.as_ref().unwrap_or(&self.weights.embedding)
    }

    /// Writes the last hidden states of the first `rows` output rows, through the last norm, to
    /// `workspace.hidden_states`.
    pub fn hidden_states(
        &self,
        backend: &mut B,
        rows: usize,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        let Workspace { hidden, output_hidden, hidden_states, outputs_all, .. } = workspace;
        let hidden = if *outputs_all { hidden } else { output_hidden };
        backend.rms_norm(rows, hidden, &self.weights.norm, self.config.norm_epsilon, hidden_states)
    }

    /// Writes the logits of `outputs`, at most `StepSpec::logits_rows` of the output rows of the last step, to
    /// `workspace.logits`.
    pub fn logits(
        &self,
        backend: &mut B,
        outputs: Range<usize>,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        let Workspace { operand, logits, .. } = workspace;
        backend.linear(outputs, operand, self.head(), Epilogue::Store, logits) // [.., v]
    }
}

/// The adapters of a step.
struct Adapted<'s, 'a, B: Backend> {
    step: B::Step<'s>,
    /// `None` if no row has one.
    adapters: Option<&'a mut B::Adapters>,
}

/// The updates of a product.
type Updates<'s, 'a, B> = AdapterUpdates<'a, <B as Compute>::Step<'s>, <B as Load>::Adapters>;

impl<'s, B: Backend> Adapted<'s, '_, B> {
    /// The updates of these rows of the step, and of this matrix.
    fn updates(&mut self, rows: StepRows, matrix: u32) -> Option<Updates<'s, '_, B>> {
        let adapters = self.adapters.as_deref_mut()?;
        Some(AdapterUpdates { step: self.step, rows, matrix, adapters })
    }
}

/// `out = linear(x)`, with the updates.
fn product<B: Backend>(
    backend: &mut B,
    rows: usize,
    x: &B::Operand,
    linear: &Linear<B::Matrix, B::Vector>,
    updates: Option<Updates<'_, '_, B>>,
    out: &mut B::Buffer,
) -> Result<(), DeviceError> {
    let epilogue = linear.bias.as_ref().map_or(Epilogue::Store, Epilogue::Bias);
    multiply(backend, rows, x, &linear.weight, epilogue, updates, out)
}

/// `out += linear(x)`, with the updates.
fn accumulate<B: Backend>(
    backend: &mut B,
    rows: usize,
    x: &B::Operand,
    linear: &Linear<B::Matrix, B::Vector>,
    updates: Option<Updates<'_, '_, B>>,
    out: &mut B::Buffer,
) -> Result<(), DeviceError> {
    let epilogue = linear.bias.as_ref().map_or(Epilogue::Add, Epilogue::AddBias);
    multiply(backend, rows, x, &linear.weight, epilogue, updates, out)
}

fn multiply<B: Backend>(
    backend: &mut B,
    rows: usize,
    x: &B::Operand,
    weight: &B::Matrix,
    epilogue: Epilogue<&B::Vector>,
    updates: Option<Updates<'_, '_, B>>,
    out: &mut B::Buffer,
) -> Result<(), DeviceError> {
    match updates {
        None => backend.linear(0..rows, x, weight, epilogue, out),
        Some(updates) => backend.linear_with_adapters(rows, x, weight, epilogue, updates, out),
    }
}
