//! Logits, hidden states or embeddings of a choice: one row per position, collected in one allocation.

use std::sync::Arc;

use penstock_types::OutputScope;

use super::FloatArray;

/// The rows of one choice in the order of their positions, all of one width.
pub struct PositionTensors {
    /// `None` if the choice has no rows.
    scope: Option<OutputScope>,
    /// The number of rows that memory is allocated for with the first one.
    num_known: usize,
    values: Vec<f32>,
    width: usize,
    /// The number of values that chunks have.
    num_taken: usize,
    /// The same memory once it is complete; `values` is empty then.
    complete: Option<Arc<FloatArray>>,
}

impl PositionTensors {
    /// The rows of a scope, with a prompt of this length.
    pub fn new(scope: Option<OutputScope>, num_prompt: usize) -> Self {
        let has_prompt = scope.is_some_and(OutputScope::has_prompt);
        let num_known = if has_prompt { num_prompt } else { 1 };
        Self { scope, num_known, values: Vec::new(), width: 0, num_taken: 0, complete: None }
    }

    /// Adds a row unless it is empty. Before the first row, memory for the rows of the prompt is allocated; for more
    /// rows it grows. Fails if the system has no memory.
    pub fn push(&mut self, row: &[f32]) -> Result<(), String> {
        if row.is_empty() {
            return Ok(());
        }
        self.width = row.len();
        let num_rows = if self.values.is_empty() { self.num_known } else { 1 };
        reserve(&mut self.values, num_rows * row.len())?;
        self.values.extend_from_slice(row);
        Ok(())
    }

    /// The rows once they are complete; `None` before, and if they were not requested.
    pub fn tensor(&self) -> Option<Arc<FloatArray>> {
        self.complete.clone()
    }

    /// A copy of the rows of this choice that were not taken yet, so that a chunk keeps no other rows in memory; `None`
    /// if it has none. Fails if the system has no memory; the rows are not taken then.
    pub fn take(&mut self) -> Result<Option<Arc<FloatArray>>, String> {
        if self.scope.is_none() {
            return Ok(None);
        }
        let mut rows = Vec::new();
        match &self.complete {
            None => {
                let values = &self.values[self.num_taken..];
                reserve(&mut rows, values.len())?;
                rows.extend_from_slice(values);
            }
            Some(complete) => {
                let num_values = complete.bits().len() - self.num_taken;
                reserve(&mut rows, num_values)?;
                rows.resize(num_values, 0.0);
                complete.copy_from(self.num_taken, &mut rows);
            }
        }
        self.num_taken += rows.len();
        Ok(Some(self.array(rows)))
    }

    fn complete(&mut self) {
        let values = std::mem::take(&mut self.values);
        self.complete = Some(self.array(values));
    }

    fn array(&self, values: Vec<f32>) -> Arc<FloatArray> {
        let num_rows = values.len().checked_div(self.width).unwrap_or(0);
        Arc::new(FloatArray::new(vec![num_rows, self.width], values))
    }
}

fn reserve(values: &mut Vec<f32>, num_values: usize) -> Result<(), String> {
    values.try_reserve(num_values).map_err(|_| {
        let bytes = (values.len() + num_values) * size_of::<f32>();
        format!("out of memory: {bytes} bytes for the requested tensors")
    })
}

/// Completes the rows of all choices. The first choice has those of the prompt, which the others share or copy.
/// `num_prompt` is the number of prompt positions except the last, which every choice has.
pub fn complete(choices: &mut [&mut PositionTensors], num_prompt: usize) -> Result<(), String> {
    let [first, others @ ..] = choices else { return Ok(()) };
    let Some(scope) = first.scope else { return Ok(()) };
    if scope == OutputScope::All {
        let prompt = &first.values[..first.values.len().min(num_prompt * first.width)];
        for rows in &mut *others {
            reserve(&mut rows.values, prompt.len())?;
            rows.values.splice(..0, prompt.iter().copied());
            rows.width = first.width;
            rows.num_taken += prompt.len(); // chunks of the first choice have them
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of width 2.
    fn row(position: usize) -> [f32; 2] {
        [position as f32, 0.5]
    }

    /// The positions in a tensor.
    fn positions(tensor: Option<Arc<FloatArray>>) -> Vec<usize> {
        let tensor = tensor.expect("it was requested");
        assert_eq!(tensor.shape(), [tensor.bits().len() / 2, 2]);
        tensor.values().chunks(2).map(|row| row[0] as usize).collect()
    }

    #[test]
    fn each_row_is_taken_once_before_or_after_the_end() {
        for num_taken_before in 0..=5 {
            let mut rows = PositionTensors::new(Some(OutputScope::All), 3);
            let mut other = PositionTensors::new(Some(OutputScope::Generation), 3);
            let (mut taken, mut taken_of_other) = (vec![], vec![]);
            for position in 0..5 {
                rows.push(&row(position)).expect("memory");
                if position >= 2 {
                    other.push(&row(position)).expect("memory");
                }
                if position < num_taken_before {
                    taken.extend(positions(rows.take().expect("memory")));
                    if position >= 2 {
                        taken_of_other.extend(positions(other.take().expect("memory")));
                    }
                }
            }
            complete(&mut [&mut rows, &mut other], 2).expect("memory");
            taken.extend(positions(rows.take().expect("memory")));
            taken_of_other.extend(positions(other.take().expect("memory")));
            assert_eq!((taken, taken_of_other), (vec![0, 1, 2, 3, 4], vec![2, 3, 4]));
            assert_eq!(positions(rows.take().expect("memory")), [0; 0]);
            assert_eq!(positions(rows.tensor()), [0, 1, 2, 3, 4]);
            assert_eq!(positions(other.tensor()), [0, 1, 2, 3, 4]);
        }
    }

    #[test]
    fn rows_that_were_not_requested_are_not_taken() {
        let mut rows = PositionTensors::new(None, 3);
        rows.push(&[]).expect("memory");
        assert_eq!(rows.take(), Ok(None));
        complete(&mut [&mut rows], 2).expect("memory");
        assert_eq!((rows.take(), rows.tensor()), (Ok(None), None));
    }
}
