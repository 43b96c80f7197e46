//! The rows of a step that have logits: the positions of prompts that are reported, and the positions at which a token
//! is sampled. They are sampled a tile at a time, as many as have their logits at once; [`LogitsRows`] keeps the
//! results until the step is finished.

use std::ops::Range;
use std::sync::Arc;

use penstock_device::Sampled;
use penstock_engine::request::{PromptPosition, Request};
use penstock_engine::{RowOutput, StepOutput, StepPlan};
use penstock_types::OutputScope;
use penstock_types::{Token, TokenDetails};

use crate::cpu_time::CpuTimer;
use crate::masks::MaskLimits;
use crate::slot::{HostSlot, no_candidates};

/// A row of the step whose logits are computed, and their use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitsRow {
    /// The index of its sequence's row in the plan.
    scheduled: usize,
    pub slot: usize,
    pub kind: Kind,
}

/// The use of a row's logits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A position of the prompt, and the token that follows it there, if its log probability is reported.
    Prompt { given: Option<u32> },
    /// A token is sampled.
    Sample {
        /// The number of tokens generated before it.
        index: u32,
        /// The number of drafts of the row before it.
        position: u32,
        /// The row's input, if it is a draft: a token is sampled only if the draft is confirmed.
        draft: Option<u32>,
    },
}

impl LogitsRow {
    /// Whether an output with this scope covers the row. The prompt's last position is where the first token is
    /// sampled.
    pub fn is_within(&self, scope: Option<OutputScope>) -> bool {
        scope.is_some_and(|scope| match self.kind {
            Kind::Prompt { .. } => scope.has_prompt(),
            Kind::Sample { index, .. } => scope.has_generation() || index == 0,
        })
    }
}

/// The sequence of a row in the plan. Another one may be in its slot when the step is finished.
struct RowSequence {
    slot: usize,
    /// The generation of the slot.
    generation: u64,
    request: Arc<Request>,
    /// Whether the input of the row is the token sampled last for its slot.
    follows_sample: bool,
    /// Whether no token of the row is sampled in this step, because its mask is late.
    is_deferred: bool,
    /// The reason that the row has no output, if it was known when the row was submitted.
    failure: Option<String>,
}

/// All rows with logits of a step, in row order. Its memory is reused.
#[derive(Default)]
pub(crate) struct LogitsRows {
    rows: Vec<LogitsRow>,
    /// The token, or the log probability of a given one; `Rejected` before it is known.
    results: Vec<Sampled>,
    /// The rows in the order of the batch entries, of all tiles so far.
    entries: Vec<usize>,
    /// Number of entries with results.
    num_recorded: usize,
    /// The embeddings of rows that report them, in row order.
    embeddings: Vec<(usize, Vec<f32>)>,
    /// The sequence of each row in the plan.
    sequences: Vec<RowSequence>,
    /// The sampled ids of one row of the plan.
    ids: Vec<u32>,
}

impl LogitsRows {
    /// An empty list, with memory for the rows of a step of `tokens` tokens.
    pub fn with_room(tokens: usize) -> Self {
        Self {
            rows: Vec::with_capacity(tokens),
            results: Vec::with_capacity(tokens),
            entries: Vec::with_capacity(tokens),
            ..Self::default()
        }
    }

    /// Removes all rows and keeps the memory.
    pub fn clear(&mut self) {
        let Self { rows, results, entries, num_recorded, embeddings, sequences, ids: _ } = self;
        rows.clear();
        results.clear();
        entries.clear();
        embeddings.clear();
        sequences.clear();
        *num_recorded = 0;
    }

    /// Finds the rows of a plan; there are none yet. `output_rows` receives the number of each among all rows of the
    /// step.
    pub fn find(&mut self, plan: &StepPlan, slots: &[HostSlot], output_rows: &mut Vec<u32>) {
        let Self { rows, results, sequences, .. } = self;
        let mut first_row = 0;
        for (scheduled, row) in plan.rows.iter().enumerate() {
            let (index, slot) = (row.slot as usize, &slots[row.slot as usize]);
            let request = Arc::clone(slot.request());
            sequences.push(RowSequence {
                slot: index,
                generation: slot.generation(),
                request,
                follows_sample: row.follows_sample,
                is_deferred: false,
                failure: None,
            });
            let step_rows = first_row..first_row + row.num_tokens;
            first_row = step_rows.end;
            if slot.failure().is_some() {
                continue;
            }
            let mut push = |step_row: u32, kind| {
                output_rows.push(step_row);
                rows.push(LogitsRow { scheduled, slot: index, kind });
                results.push(match kind {
                    Kind::Prompt { given: None } => Sampled::Token(Token::new(0, f32::NAN)),
                    _ => Sampled::Rejected,
                });
            };
            let Request { prompt, outputs, .. } = &**slot.request();
            for position in row.prompt_outputs.clone() {
                let next = prompt.get(position as usize + 1).copied();
                let given = next.filter(|_| outputs.prompt_logprobs.is_some());
                push(step_rows.start + position - row.start, Kind::Prompt { given });
            }
            let Some(sample) = row.sample else { continue };
            let drafts = &plan.tokens[(row.tokens.end - row.num_drafts) as usize..row.tokens.end as usize];
            for position in 0..=row.num_drafts {
                let draft = position.checked_sub(1).map(|before| drafts[before as usize]);
                let kind = Kind::Sample { index: sample.index + position, position, draft };
                push(step_rows.end - 1 - row.num_drafts + position, kind);
            }
        }
    }

    /// The next tile of at most `limit` rows from `start` on, and whether its logits are computed; `None` after the
    /// last row. A tile with logits begins and ends with a row that needs them, so that few others are computed.
    pub fn tile(&self, start: usize, limit: usize, slots: &[HostSlot]) -> Option<(Range<usize>, bool)> {
        let rows = self.rows.get(start..)?;
        let rows = &rows[..rows.len().min(limit)];
        let needs_logits = |row: &LogitsRow| match row.kind {
            Kind::Prompt { given: None } => row.is_within(slots[row.slot].outputs().logits),
            _ => true,
        };
        match rows.iter().position(needs_logits) {
            _ if rows.is_empty() => None,
            None => Some((start..start + rows.len(), false)),
            Some(0) => {
                let last = rows.iter().rposition(needs_logits).unwrap_or_default();
                Some((start..start + last + 1, true))
            }
            Some(first) => Some((start..start + first, false)),
        }
    }

    /// The row at `index`.
    pub fn row(&self, index: usize) -> LogitsRow {
        self.rows[index]
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Keeps the embedding of the row at `index` for its result. The rows come in order.
    pub fn push_embedding(&mut self, index: usize, embedding: Vec<f32>) {
        self.embeddings.push((index, embedding));
    }

    /// Whether every row of the plan samples a token and has a slot for which `is_so` is true.
    pub fn all_sample(&self, is_so: impl Fn(usize) -> bool) -> bool {
        self.sampled_slots().filter(|(slot, ..)| is_so(*slot)).count() == self.sequences.len()
    }

    /// The slots that sample a token, each with its drafts and whether its row follows a sample.
    pub fn sampled_slots(&self) -> impl Iterator<Item = (usize, bool, impl Iterator<Item = u32> + Clone)> {
        let is_first = |row: &LogitsRow| matches!(row.kind, Kind::Sample { position: 0, .. });
        let firsts = self.rows.iter().enumerate().filter(move |(_, row)| is_first(row));
        firsts.map(|(index, row)| {
            let follows_sample = self.sequences[row.scheduled].follows_sample;
            (row.slot, follows_sample, drafts_of(&self.rows[index + 1..]))
        })
    }

    /// Defers the rows of the plan that cannot be sampled yet.
    pub fn defer_late(&mut self, slots: &mut [HostSlot]) {
        let Self { rows, sequences, .. } = self;
        for (index, row) in rows.iter().enumerate() {
            if matches!(row.kind, Kind::Sample { position: 0, .. }) {
                let sequence = &mut sequences[row.scheduled];
                let drafts = drafts_of(&rows[index + 1..]);
                sequence.is_deferred = slots[row.slot].defer(sequence.follows_sample, drafts);
            }
        }
    }

    /// Whether the row at `index` belongs to a row of the plan that is deferred.
    pub fn is_deferred(&self, index: usize) -> bool {
        self.sequences[self.rows[index].scheduled].is_deferred
    }

    /// Notes that the next entry of the batch is for the row at `index`.
    pub fn push_entry(&mut self, index: usize) {
        self.entries.push(index);
    }

    /// Notes the failures of the requests, now that all rows are submitted.
    pub fn note_failures(&mut self, slots: &[HostSlot]) {
        for RowSequence { slot, failure, .. } in &mut self.sequences {
            *failure = slots[*slot].failure().cloned();
        }
    }

    /// Stores the results of the next entries.
    pub fn record(&mut self, sampled: &mut [Sampled]) {
        let entries = &self.entries[self.num_recorded..][..sampled.len()];
        for (row, sampled) in entries.iter().zip(sampled) {
            self.results[*row] = std::mem::take(sampled);
        }
        self.num_recorded += entries.len();
    }

    /// The rows of a tile that have a token, with its details.
    pub fn details(
        &mut self,
        tile: Range<usize>,
    ) -> impl Iterator<Item = (usize, LogitsRow, &mut Option<Box<TokenDetails>>)> {
        let rows = tile.clone().zip(&self.rows[tile.clone()]).zip(&mut self.results[tile]);
        rows.filter_map(|((index, row), result)| match result {
            Sampled::Token(token) => Some((index, *row, &mut token.details)),
            _ => None,
        })
    }

    /// Writes the output of the step and advances the slots by their tokens. Grammars that are slow, and those after
    /// the others have taken as long as a step waits at most, accept their tokens later.
    pub fn finish(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        slots: &mut [HostSlot],
        vocabulary: usize,
        limits: MaskLimits,
    ) {
        let timer = CpuTimer::start();
        let mut rows = self.rows.iter().zip(self.results.drain(..)).enumerate().peekable();
        let mut embeddings = self.embeddings.drain(..).peekable();
        for (scheduled, row) in plan.rows.iter().enumerate() {
            let (first_position, first_token) = (output.positions.len(), output.sampled.len());
            let mut without_candidates = None;
            while let Some((index, (row, mut result))) =
                rows.next_if(|(_, (row, _))| row.scheduled == scheduled)
            {
                if let Some((_, embedding)) = embeddings.next_if(|(at, _)| *at == index)
                    && let Sampled::Token(token) = &mut result
                {
                    token.details.get_or_insert_default().embedding = embedding;
                }
                match (result, row.kind) {
                    (Sampled::Token(Token { logprob, details, .. }), Kind::Prompt { .. }) => {
                        output.positions.push(PromptPosition { logprob, details });
                    }
                    (Sampled::Token(token), Kind::Sample { .. }) => output.sampled.push(token),
                    (Sampled::NoCandidates, Kind::Sample { index, .. }) => without_candidates = Some(index),
                    _ => {}
                }
            }
            let slot = &mut slots[row.slot as usize];
            let RowSequence { generation, request, is_deferred, failure, .. } =
                &mut self.sequences[scheduled];
            let (is_current, start) = (slot.generation() == *generation, output.forced.len() as u32);
            if is_current {
                self.ids.clear();
                self.ids.extend(output.sampled[first_token..].iter().map(|token| token.id));
                // A row planned before its request failed.
                let is_late = slot.failure().is_some();
                if is_late {
                    output.sampled.truncate(first_token);
                } else if !*is_deferred {
                    let is_quick = |cost| cost <= limits.slow && timer.elapsed() < limits.most_wait;
                    slot.accept(&self.ids, slot.grammar_cost().is_none_or(is_quick));
                    if let Some(index) = without_candidates {
                        slot.mark_no_candidates(index);
                    }
                    if !self.ids.is_empty() {
                        slot.forced(vocabulary, &mut output.forced);
                    }
                }
            }
            let num_tokens = output.sampled.len() - first_token;
            // A failure after a token is reported with the next row, as it would be without drafts.
            let failure = match is_current {
                _ if num_tokens > 0 => None,
                true => slot.failure().cloned(),
                false => failure.take().or_else(|| Some(no_candidates(request, without_candidates?))),
            };
            if failure.is_some() {
                output.positions.truncate(first_position);
            }
            output.rows.push(RowOutput {
                num_tokens: num_tokens as u32,
                num_positions: (output.positions.len() - first_position) as u32,
                forced: start..output.forced.len() as u32,
                is_deferred: *is_deferred && failure.is_none(),
                failure,
            });
        }
    }
}

/// The drafts at the beginning of these rows.
fn drafts_of(rows: &[LogitsRow]) -> impl Iterator<Item = u32> + Clone {
    rows.iter().map_while(|row| match row.kind {
        Kind::Sample { draft, .. } => draft,
        Kind::Prompt { .. } => None,
    })
}

/// Makes room for `num_values` in the empty `values`. Fails if the system has no memory for them, or from `refused`
/// values on.
pub(crate) fn allocate_details(
    values: &mut Vec<f32>,
    num_values: usize,
    refused: usize,
) -> Result<(), String> {
    if num_values >= refused || values.try_reserve_exact(num_values).is_err() {
        let bytes = num_values * size_of::<f32>();
        return Err(format!("out of memory: {bytes} bytes for the requested tensors"));
    }
    values.resize(num_values, 0.0);
    Ok(())
}
