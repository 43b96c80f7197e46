//! The decoder: embedding, layers of attention and feed-forward, norm, head. Written once for every family and device.
//!
//! Shapes are in the margins: t = rows (tokens) of the step, o = rows whose logits are wanted, h = hidden size,
//! i = intermediate size, v = vocabulary.

use penstock_device::{AttentionParams, AttentionRow, Backend, DeviceError, Epilogue, StepInputs};

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
    normed: B::Buffer,
    qkv: B::Buffer,
    attended: B::Buffer,
    gate_up: B::Buffer,
    gated: B::Buffer,
    /// The rows whose logits are wanted: residual stream and attention output.
    output_hidden: B::Buffer,
    output_attended: B::Buffer,
    /// Logits of those rows, after [`Decoder::forward`].
    pub logits: B::Buffer,
}

impl<B: Backend> Workspace<B> {
    /// Room for steps of up to `tokens` rows, `outputs` of them with logits.
    pub fn new(
        backend: &mut B,
        config: &ModelConfig,
        tokens: usize,
        outputs: usize,
    ) -> Result<Self, DeviceError> {
        let (hidden, heads, wide) = (config.hidden_size, config.heads, config.intermediate_size);
        Ok(Self {
            hidden: backend.allocate(tokens * hidden)?,
            normed: backend.allocate(tokens * hidden)?,
            qkv: backend.allocate(tokens * heads.qkv_width())?,
            attended: backend.allocate(tokens * heads.query_width())?,
            gate_up: backend.allocate(tokens * 2 * wide)?,
            gated: backend.allocate(tokens * wide)?,
            output_hidden: backend.allocate(outputs * hidden)?,
            output_attended: backend.allocate(outputs * heads.query_width())?,
            logits: backend.allocate(outputs * config.vocabulary_size)?,
        })
    }

    /// Bytes that [`new`](Self::new) takes, for sizing what is left.
    pub fn bytes(config: &ModelConfig, tokens: usize, outputs: usize) -> u64 {
        let (hidden, heads, wide) = (config.hidden_size, config.heads, config.intermediate_size);
        let row = 2 * hidden + heads.qkv_width() + heads.query_width() + 3 * wide;
        let output = hidden + heads.query_width() + config.vocabulary_size;
        4 * (tokens as u64 * row as u64 + outputs as u64 * output as u64)
    }
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

    /// Computes the step: keys and values of every row go to `cache`, logits of the output rows to `workspace.logits`.
    pub fn forward(
        &self,
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
        for (index, layer) in self.layers.iter().enumerate() {
            backend.rms_norm(tokens, &w.hidden, &layer.attention_norm, epsilon, &mut w.normed)?;
            product(backend, tokens, &w.normed, &layer.qkv, &mut w.qkv)?; // [t, q + 2 kv]
            let norms = layer.qk_norm.as_ref().map(|(q, k)| (q, k, epsilon));
            backend.rope_write_kv(step, config.heads, norms, &mut w.qkv, index, cache)?;
            let last = index + 1 == self.layers.len();
            if last && outputs == 0 {
                return Ok(()); // a chunk in the middle of a prompt: only its keys and values were wanted
            }
            let params = AttentionParams { scale, window: layer.window };
            backend.attention(step, config.heads, params, index, cache, &w.qkv, &mut w.attended)?; // [t, q]
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
        backend.rms_norm(outputs, &w.output_hidden, &self.norm, epsilon, &mut w.normed)?; // [o, h]
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        backend.linear(outputs, &w.normed, head, Epilogue::Store, &mut w.logits) // [o, v]
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
    backend.linear(rows, x, &linear.weight, epilogue, out)
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
    backend.linear(rows, x, &linear.weight, epilogue, out)
}
