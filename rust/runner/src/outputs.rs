//! The rows of a step from which something is told: a position of a prompt, or the next token. They are gone through a tile
//! at a time, as many as have their logits at once, and within a tile in rounds: a token behind a draft is chosen after the
//! one before it turned out to be that draft, since all that choosing depends on has moved on by then.

use std::ops::Range;

use penstock_engine::executor::{RowOutput, StepOutput, StepPlan};
use penstock_engine::request::{PromptPosition, Request, Token, TokenDetails};
use penstock_types::OutputScope;

use crate::slot::Slot;

/// One of the rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// Which row of the plan it belongs to, and that one's slot.
    work: usize,
    pub slot: usize,
    pub kind: Kind,
}

/// What is told from a row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A position of the prompt, and the token that follows it there, if that is told of.
    Prompt { given: Option<u32> },
    /// The next token, the request's `index`-th.
    Next {
        index: u32,
        /// The row's input is a draft.
        after_draft: bool,
        /// The input of the next row, if that is a draft: it counts if this token turns out to be the same.
        draft: Option<u32>,
    },
}

impl Output {
    /// Whether it is of those that something is told of. The prompt's last position is where the first token is chosen.
    pub fn is_within(&self, extent: Option<OutputScope>) -> bool {
        extent.is_some_and(|extent| match self.kind {
            Kind::Prompt { .. } => extent.has_prompt(),
            Kind::Next { index, .. } => extent.has_generation() || index == 0,
        })
    }
}

/// All of a step, in row order. Its memory is kept from step to step.
#[derive(Default)]
pub(crate) struct Outputs {
    rows: Vec<Output>,
    /// What each row has told; nothing where a draft turned out wrong before it, or its request has failed.
    told: Vec<Option<Token>>,
    /// The rows of this round, ascending.
    round: Vec<usize>,
}

impl Outputs {
    /// With room for a step of so many tokens.
    pub fn with_room(tokens: usize) -> Self {
        let (rows, told) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        Self { rows, told, round: Vec::with_capacity(tokens) }
    }

    /// Finds the output rows of a plan. `output_rows` gets the number of each among all rows.
    pub fn find(&mut self, plan: &StepPlan, slots: &[Slot], output_rows: &mut Vec<u32>) {
        self.rows.clear();
        let mut first_row = 0;
        for (index, work) in plan.rows.iter().enumerate() {
            let slot = &slots[work.slot as usize];
            let rows = first_row..first_row + work.num_tokens;
            first_row = rows.end;
            if slot.failure().is_some() {
                continue;
            }
            let mut push = |row: u32, kind| {
                output_rows.push(row);
                self.rows.push(Output { work: index, slot: work.slot as usize, kind });
            };
            let Request { prompt, outputs, .. } = slot.request();
            for position in work.prompt_outputs.clone() {
                let next = prompt.get(position as usize + 1).copied();
                let given = next.filter(|_| outputs.prompt_logprobs.is_some());
                push(rows.start + position - work.start, Kind::Prompt { given });
            }
            let Some(sample) = work.sample else { continue };
            let drafts = &plan.tokens[(work.tokens.end - work.num_drafts) as usize..work.tokens.end as usize];
            for num_before in 0..=work.num_drafts {
                let index = sample.index + num_before;
                let draft = drafts.get(num_before as usize).copied();
                let kind = Kind::Next { index, after_draft: num_before > 0, draft };
                push(rows.end - 1 - work.num_drafts + num_before, kind);
            }
        }
        self.told.clear();
        self.told.resize_with(self.rows.len(), || None);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The slots that choose a token, whatever becomes of drafts.
    pub fn choosing(&self) -> impl Iterator<Item = usize> {
        let choosing = |row: &&Output| matches!(row.kind, Kind::Next { after_draft: false, .. });
        self.rows.iter().filter(choosing).map(|row| row.slot)
    }

    /// Begins a tile: its first round is of all rows that need not wait for others of the tile. What takes no choosing is
    /// told at once. Returns the slot whose drafts go on from the tile before.
    pub fn begin(&mut self, tile: Range<usize>, slots: &[Slot]) -> Option<usize> {
        self.round.clear();
        let mut goes_on = None;
        for index in tile.clone() {
            match self.rows[index].kind {
                Kind::Prompt { given: Some(_) } | Kind::Next { after_draft: false, .. } => {
                    self.round.push(index)
                }
                Kind::Prompt { given: None } => self.told[index] = Some(Token::new(0, f32::NAN)),
                Kind::Next { after_draft: true, .. }
                    if index == tile.start && self.goes_on_after(index - 1, slots) =>
                {
                    goes_on = Some(self.rows[index].slot);
                    self.round.push(index);
                }
                Kind::Next { after_draft: true, .. } => {}
            }
        }
        goes_on
    }

    /// The next round of a tile: the rows behind those of the last one whose token was the draft.
    pub fn go_on(&mut self, tile: Range<usize>, slots: &[Slot]) {
        let mut round = std::mem::take(&mut self.round);
        round.retain_mut(|index| {
            let goes_on = *index + 1 < tile.end && self.goes_on_after(*index, slots);
            *index += 1;
            goes_on
        });
        self.round = round;
    }

    fn goes_on_after(&self, index: usize, slots: &[Slot]) -> bool {
        let Output { slot, kind: Kind::Next { draft: Some(draft), .. }, .. } = self.rows[index] else {
            return false;
        };
        self.told[index].as_ref().is_some_and(|token| token.id == draft && slots[slot].goes_on_after(draft))
    }

    /// The rows of this round.
    pub fn round(&self) -> impl ExactSizeIterator<Item = (usize, Output)> {
        self.round.iter().map(|index| (*index, self.rows[*index]))
    }

    /// The one in this place of the round.
    pub fn in_round(&self, place: usize) -> (usize, Output) {
        let index = self.round[place];
        (index, self.rows[index])
    }

    /// Drops the rows of the round whose slots have failed.
    pub fn drop_failed(&mut self, slots: &[Slot]) {
        let Self { rows, round, .. } = self;
        round.retain(|index| slots[rows[*index].slot].failure().is_none());
    }

    /// What a row tells.
    pub fn tell(&mut self, index: usize, token: Token) {
        self.told[index] = Some(token);
    }

    /// Those of a tile that have told something, which can get details.
    pub fn told(
        &mut self,
        tile: Range<usize>,
    ) -> impl Iterator<Item = (usize, Output, &mut Option<Box<TokenDetails>>)> {
        let rows = tile.clone().zip(&self.rows[tile.clone()]).zip(&mut self.told[tile]);
        rows.filter_map(|((index, row), told)| told.as_mut().map(|token| (index, *row, &mut token.details)))
    }

    /// Writes the output of the step.
    pub fn answer(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        slots: &mut [Slot],
        vocabulary: usize,
    ) {
        let mut rows = self.rows.iter().zip(self.told.drain(..)).peekable();
        for (index, work) in plan.rows.iter().enumerate() {
            let num_positions = output.positions.len();
            let mut answer = RowOutput::default();
            while let Some((row, told)) = rows.next_if(|(row, _)| row.work == index) {
                let Some(token) = told else { continue };
                match row.kind {
                    Kind::Prompt { .. } => {
                        let Token { logprob, details, .. } = token;
                        output.positions.push(PromptPosition { logprob, details });
                        answer.num_positions += 1;
                    }
                    Kind::Next { .. } => {
                        output.sampled.push(token);
                        answer.num_tokens += 1;
                    }
                }
            }
            let slot = &mut slots[work.slot as usize];
            if answer.num_tokens > 0 {
                // A failure after that is told when the next token is wanted, as it would be without drafts.
                let start = output.forced.len() as u32;
                slot.forced(vocabulary, &mut output.forced);
                answer.forced = start..output.forced.len() as u32;
            } else if let Some(failure) = slot.failure() {
                output.positions.truncate(num_positions);
                answer = RowOutput { failure: Some(failure.clone()), ..RowOutput::default() };
            }
            output.rows.push(answer);
        }
    }
}
