//! Rows of numbers, one a position, gathered in one piece of memory: logits and hidden states.

use crate::tensor::Tensor;
use penstock_types::{OutputScope, RequestedOutputs};

/// The rows of one choice, in the order of their positions, all of one width.
#[derive(Default)]
pub struct Rows {
    values: Vec<f32>,
    width: usize,
    /// The same memory once it is whole; `values` is empty then.
    whole: Option<Tensor>,
}

impl Rows {
    /// Adds a row, if it is one. With the first comes how many there will be at least; memory for those is had at once,
    /// and for more as they come. Fails where the system has none.
    pub fn push(&mut self, row: &[f32], num_known: usize) -> Result<(), String> {
        if row.is_empty() {
            return Ok(());
        }
        self.width = row.len();
        let num_rows = if self.values.is_empty() { num_known.max(1) } else { 1 };
        self.reserve(num_rows * row.len())?;
        self.values.extend_from_slice(row);
        Ok(())
    }

    /// What they are once whole; `None` before, and where nobody asked for them.
    pub fn tensor(&self) -> Option<Tensor> {
        self.whole.clone()
    }

    fn reserve(&mut self, num_values: usize) -> Result<(), String> {
        self.values.try_reserve(num_values).map_err(|_| {
            let bytes = (self.values.len() + num_values) * size_of::<f32>();
            format!("the system has no {bytes} bytes for the logits or hidden states that were asked for")
        })
    }

    fn complete(&mut self) {
        let num_rows = self.values.len().checked_div(self.width).unwrap_or(0);
        self.whole = Some(Tensor::new(vec![num_rows, self.width], std::mem::take(&mut self.values)));
    }
}

/// What the engine is to tell of every choice but the first: all choices have one prompt, so telling of that once is
/// enough.
pub fn without_prompt(reports: RequestedOutputs) -> RequestedOutputs {
    let without = |extent: Option<OutputScope>| {
        extent.filter(|extent| extent.has_generation()).map(|_| OutputScope::Generation)
    };
    RequestedOutputs {
        prompt_logprobs: None,
        logits: without(reports.logits),
        hidden_states: without(reports.hidden_states),
        ..reports
    }
}

/// Completes the rows of all choices, of which only the first was told of the prompt: the others share or repeat that.
/// `num_prompt` rows are of the prompt but for its last position, which each choice has one of.
pub fn complete(choices: &mut [&mut Rows], extent: OutputScope, num_prompt: usize) -> Result<(), String> {
    let [first, others @ ..] = choices else { return Ok(()) };
    if extent == OutputScope::All {
        let prompt = &first.values[..first.values.len().min(num_prompt * first.width)];
        for rows in &mut *others {
            rows.reserve(prompt.len())?;
            rows.values.splice(..0, prompt.iter().copied());
            rows.width = first.width;
        }
    }
    first.complete();
    for rows in others {
        match extent {
            OutputScope::Prompt => rows.whole = first.tensor(),
            OutputScope::Generation | OutputScope::All => rows.complete(),
        }
    }
    Ok(())
}
