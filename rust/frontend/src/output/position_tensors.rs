//! Logits or hidden states of a choice: one row per position, collected in one allocation.

use std::sync::Arc;

use penstock_types::OutputScope;

use super::FloatArray;

/// The rows of one choice in the order of their positions, all of one width.
#[derive(Default)]
pub struct PositionTensors {
    values: Vec<f32>,
    width: usize,
    /// The same memory once it is complete; `values` is empty then.
    complete: Option<Arc<FloatArray>>,
}

impl PositionTensors {
    /// Adds a row unless it is empty. Before the first row, memory for `num_known` rows is allocated; for more rows it
    /// grows. Fails if the system has no memory.
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

    /// The rows once they are complete; `None` before, and if they were not requested.
    pub fn tensor(&self) -> Option<Arc<FloatArray>> {
        self.complete.clone()
    }

    fn reserve(&mut self, num_values: usize) -> Result<(), String> {
        self.values.try_reserve(num_values).map_err(|_| {
            let bytes = (self.values.len() + num_values) * size_of::<f32>();
            format!("out of memory: {bytes} bytes for the requested logits or hidden states")
        })
    }

    fn complete(&mut self) {
        let num_rows = self.values.len().checked_div(self.width).unwrap_or(0);
        let values = std::mem::take(&mut self.values);
        self.complete = Some(Arc::new(FloatArray::new(vec![num_rows, self.width], values)));
    }
}

/// Completes the rows of all choices. The first choice has those of the prompt, which the others share or copy. `num_prompt`
/// is the number of prompt positions except the last, which every choice has.
pub fn complete(
    choices: &mut [&mut PositionTensors],
    scope: OutputScope,
    num_prompt: usize,
) -> Result<(), String> {
    let [first, others @ ..] = choices else { return Ok(()) };
    if scope == OutputScope::All {
        let prompt = &first.values[..first.values.len().min(num_prompt * first.width)];
        for rows in &mut *others {
            rows.reserve(prompt.len())?;
            rows.values.splice(..0, prompt.iter().copied());
            rows.width = first.width;
        }
    }
    first.complete();
    for rows in others {
        match scope {
            OutputScope::Prompt => rows.complete = first.tensor(),
            OutputScope::Generation | OutputScope::All => rows.complete(),
        }
    }
    Ok(())
}
