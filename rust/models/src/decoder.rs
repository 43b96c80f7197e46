//! The decoder: embedding, layers of attention and feed-forward, norm, head. Written once for every family and device.
//!
//! Shapes are in the margins: t = rows (tokens) of the step, o = output rows, h = hidden size,
//! i = intermediate size, v = vocabulary.

use std::ops::Range;

use penstock_device::{Backend, DeviceError, StepInputs, StepSpec};
use penstock_types::{AttentionParams, AttentionRow, Epilogue};

use crate::config::ModelConfig;
use crate::rope::{Frequencies, append_rotation};

/// A weight and its bias.
pub(crate) struct Linear<B: Backend> {
    pub(crate) weight: B::Matrix,
    pub(crate) bias: Option<B::Vector>,
}

/// One decoder layer.
pub(crate) struct Layer<B: Backend> {
    pub(crate) attention_norm: B::Vector,
    pub(crate) qkv: Linear<B>,
    pub(crate) qk_norm: Option<(B::Vector, B::Vector)>,
    pub(crate) output: Linear<B>,
    pub(crate) mlp_norm: B::Vector,
    pub(crate) gate_up: Linear<B>,
    pub(crate) down: Linear<B>,
    pub(crate) window: Option<usize>,
}

/// A loaded model. Immutable; the cache and the workspace belong to whoever runs it.
pub struct Decoder<B: Backend> {
    config: ModelConfig,
    embedding: B::Matrix,
    layers: Vec<Layer<B>>,
    norm: B::Vector,
    /// `None` where the embedding is the head.
    head: Option<B::Matrix>,
    /// Rope frequencies of every position but those that a dynamic scaling stretches.
    frequencies: Frequencies,
}

/// Activations of one step, allocated once for the largest.
pub struct Workspace<B: Backend> {
    hidden: B::Buffer,
    /// The last hidden states of the output rows, after [`Decoder::forward`].
    pub normed: B::Buffer,
    qkv: B::Buffer,
    attended: B::Buffer,
    gate_up: B::Buffer,
    gated: B::Buffer,
    /// Residual stream and attention output of the output rows.
    output_hidden: B::Buffer,
    output_attended: B::Buffer,
    /// What [`Decoder::logits`] computed last.
    pub logits: B::Buffer,
    /// What operations need while they run.
    pub scratch: B::Scratch,
}

impl<B: Backend> Workspace<B> {
    /// Room for steps as large as `spec`.
    pub fn new(backend: &mut B, config: &ModelConfig, spec: &StepSpec) -> Result<Self, DeviceError> {
        let [hidden, normed, qkv, attended, gate_up, gated, output_hidden, output_attended, logits] =
            buffer_lens(config, spec);
        Ok(Self {
            hidden: backend.allocate(hidden)?,
            normed: backend.allocate(normed)?,
            qkv: backend.allocate(qkv)?,
            attended: backend.allocate(attended)?,
            gate_up: backend.allocate(gate_up)?,
            gated: backend.allocate(gated)?,
            output_hidden: backend.allocate(output_hidden)?,
            output_attended: backend.allocate(output_attended)?,
            logits: backend.allocate(logits)?,
            scratch: backend.allocate_scratch(spec)?,
        })
    }

    /// Bytes that [`new`](Self::new) takes.
    pub fn bytes(backend: &B, config: &ModelConfig, spec: &StepSpec) -> u64 {
        let buffers = buffer_lens(config, spec).map(|len| backend.buffer_bytes(len));
        buffers.into_iter().fold(backend.scratch_bytes(spec), u64::saturating_add)
    }
}

/// Values of each buffer, in the order of the fields.
fn buffer_lens(config: &ModelConfig, spec: &StepSpec) -> [usize; 9] {
    let (hidden, heads, wide) = (config.hidden_size, config.heads, config.intermediate_size);
    let row = |width: usize| spec.tokens.saturating_mul(width);
    [
        row(hidden),
        row(hidden),
        row(heads.qkv_width()),
        row(heads.query_width()),
        row(2 * wide),
        row(wide),
        row(hidden),
        row(heads.query_width()),
        spec.logits_rows.saturating_mul(config.vocabulary_size),
    ]
}

impl<B: Backend> Decoder<B> {
    pub(crate) fn new(
        config: ModelConfig,
        embedding: B::Matrix,
        layers: Vec<Layer<B>>,
        norm: B::Vector,
        head: Option<B::Matrix>,
    ) -> Self {
        let frequencies = config.rope.frequencies(config.rope.frequency_len(0, 0));
        Self { config, embedding, layers, norm, head, frequencies }
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Appends one sequence's rows to a step: its tokens at positions from `start`, their rotation angles, and where their
    /// keys and values go. The sequence's block table must already be the last `num_blocks` entries of `inputs.blocks`.
    pub fn push_sequence(
        &self,
        inputs: &mut StepInputs,
        tokens: impl ExactSizeIterator<Item = u32>,
        start: usize,
        prompt_len: usize,
        num_blocks: usize,
        block_size: usize,
    ) {
        let (rope, num_tokens) = (&self.config.rope, tokens.len());
        let first_row = inputs.tokens.len();
        let blocks = inputs.blocks.len() - num_blocks..inputs.blocks.len();
        inputs.tokens.extend(tokens);
        let usual_len = rope.frequency_len(0, 0);
        let mut stretched: Option<(usize, Frequencies)> = None;
        for position in start..start + num_tokens {
            let wanted = rope.frequency_len(position, prompt_len);
            let frequencies = if wanted == usual_len {
                &self.frequencies
            } else {
                let current = stretched.take_if(|(len, _)| *len == wanted);
                &stretched.insert(current.unwrap_or_else(|| (wanted, rope.frequencies(wanted)))).1
            };
            append_rotation(position, frequencies, &mut inputs.cosines, &mut inputs.sines);
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

    /// Computes the step: keys and values of every row go to `cache`, the last hidden states of the output rows, through
    /// the last norm, to `workspace.normed`.
    pub fn forward(
        &self,
        backend: &mut B,
        inputs: &StepInputs,
        cache: &mut B::Cache,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        self.forward_through(&self.layers, backend, inputs, cache, workspace)
    }

    /// The step through no more than `num_layers` layers, and what follows the layers: uses all the memory that
    /// [`forward`](Self::forward) does, because its layers share it, in a fraction of the time. For warming up; what comes
    /// out means nothing.
    pub fn forward_through_some(
        &self,
        num_layers: usize,
        backend: &mut B,
        inputs: &StepInputs,
        cache: &mut B::Cache,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        // A window would hide the far end of a long context.
        let farthest =
            (0..self.layers.len()).max_by_key(|index| self.layers[*index].window.unwrap_or(usize::MAX));
        let num_layers = num_layers.min(self.layers.len());
        let first = farthest.unwrap_or(0).min(self.layers.len() - num_layers);
        self.forward_through(&self.layers[first..][..num_layers], backend, inputs, cache, workspace)
    }

    fn forward_through(
        &self,
        layers: &[Layer<B>],
        backend: &mut B,
        inputs: &StepInputs,
        cache: &mut B::Cache,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        let step = backend.upload(inputs)?;
        let (tokens, outputs) = (inputs.tokens.len(), inputs.output_rows.len());
        let (config, w) = (&self.config, workspace);
        let epsilon = config.norm_epsilon;
        let scale = 1.0 / (config.heads.head_dim as f32).sqrt();
        backend.embed(step, &self.embedding, &mut w.hidden)?; // [t, h]
        for (index, layer) in layers.iter().enumerate() {
            backend.rms_norm(tokens, &w.hidden, &layer.attention_norm, epsilon, &mut w.normed)?;
            product(backend, tokens, &w.normed, &layer.qkv, &mut w.qkv)?; // [t, q + 2 kv]
            let norms = layer.qk_norm.as_ref().map(|(q, k)| (q, k, epsilon));
            backend.rope_write_kv(step, config.heads, norms, &mut w.qkv, index, cache)?;
            let last = index + 1 == layers.len();
            if last && outputs == 0 {
                return Ok(()); // a chunk in the middle of a prompt: only its keys and values were wanted
            }
            let params = AttentionParams { scale, window: layer.window, softcap: None };
            let (scratch, attended) = (&mut w.scratch, &mut w.attended);
            backend.attention(step, config.heads, params, index, cache, &w.qkv, scratch, attended)?; // [t, q]
            // Behind the last attention a row needs nothing from the others: go on with the wanted ones alone.
            let (rows, hidden, attended) = if last {
                backend.gather(step, config.hidden_size, &w.hidden, &mut w.output_hidden)?; // [o, h]
                backend.gather(step, config.heads.query_width(), &w.attended, &mut w.output_attended)?;
                (outputs, &mut w.output_hidden, &w.output_attended)
            } else {
                (tokens, &mut w.hidden, &w.attended)
            };
            accumulate(backend, rows, attended, &layer.output, hidden)?;
            backend.rms_norm(rows, hidden, &layer.mlp_norm, epsilon, &mut w.normed)?;
            product(backend, rows, &w.normed, &layer.gate_up, &mut w.gate_up)?; // [t, 2 i]
            backend.silu_mul(rows, config.intermediate_size, &w.gate_up, &mut w.gated)?; // [t, i]
            accumulate(backend, rows, &w.gated, &layer.down, hidden)?;
        }
        backend.rms_norm(outputs, &w.output_hidden, &self.norm, epsilon, &mut w.normed) // [o, h]
    }

    /// Logits of `outputs`, some of the output rows of the last step, no more than `StepSpec::logits_rows`: to
    /// `workspace.logits`, the first one's first.
    pub fn logits(
        &self,
        backend: &mut B,
        outputs: Range<usize>,
        workspace: &mut Workspace<B>,
    ) -> Result<(), DeviceError> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        backend.linear(outputs, &workspace.normed, head, Epilogue::Store, &mut workspace.logits) // [.., v]
    }
}

/// `out = linear(x)`
fn product<B: Backend>(
    backend: &mut B,
    rows: usize,
    x: &B::Buffer,
    linear: &Linear<B>,
    out: &mut B::Buffer,
) -> Result<(), DeviceError> {
    let epilogue = linear.bias.as_ref().map_or(Epilogue::Store, Epilogue::Bias);
    backend.linear(0..rows, x, &linear.weight, epilogue, out)
}

/// `out += linear(x)`
fn accumulate<B: Backend>(
    backend: &mut B,
    rows: usize,
    x: &B::Buffer,
    linear: &Linear<B>,
    out: &mut B::Buffer,
) -> Result<(), DeviceError> {
    let epilogue = linear.bias.as_ref().map_or(Epilogue::Add, Epilogue::AddBias);
    backend.linear(0..rows, x, &linear.weight, epilogue, out)
}
