//! Rotations: the cosines and sines of the angles of a position, in the rope table or for one row; and the scales of
//! queries.

use std::ops::Range;

use penstock_device::{EXTRA, RowSource};

use crate::rope::{Frequencies, Rope};

/// Writes the cosines of one position to the first half of `out`, and the sines to the second.
fn write_rotation(position: usize, (frequencies, factor): &Frequencies, out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(frequencies.len());
    for ((frequency, cosine), sine) in frequencies.iter().zip(cosines).zip(sines) {
        // The product is rounded to float32 first, as `transformers` does; its sine and cosine are exact to the last
        // bit.
        let angle = f64::from(position as f32 * frequency);
        let (exact_sine, exact_cosine) = angle.sin_cos();
        *cosine = exact_cosine as f32 * factor;
        *sine = exact_sine as f32 * factor;
    }
}

/// The rotations of the positions whose frequencies depend on nothing but the model.
pub(crate) struct RopeTable {
    frequencies: Frequencies,
    positions: usize,
}

impl RopeTable {
    /// The table of a model that computes `positions`.
    pub(crate) fn new(rope: &Rope, positions: usize) -> Self {
        let frequencies = rope.frequencies(rope.frequency_len(0, 0));
        Self { frequencies, positions: rope.table_len(positions) }
    }
}

impl RowSource for RopeTable {
    fn rows(&self) -> usize {
        self.positions
    }

    fn columns(&self) -> usize {
        2 * self.frequencies.0.len()
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (position, out) in rows.zip(out.chunks_exact_mut(self.columns())) {
            write_rotation(position, &self.frequencies, out);
        }
    }
}

/// The rotations of one sequence that are not in the table: with dynamic scaling, those of long sequences.
pub(crate) struct ExtraRotations<'a> {
    rope: &'a Rope,
    usual_len: usize,
    /// The frequencies computed last, with their length.
    current: Option<(usize, Frequencies)>,
}

impl<'a> ExtraRotations<'a> {
    pub(crate) fn new(rope: &'a Rope) -> Self {
        Self { rope, usual_len: rope.frequency_len(0, 0), current: None }
    }

    /// The entry of `StepInputs::positions` for a position. Appends its rotation to `extra` if it is not in the table.
    pub(crate) fn rotation(&mut self, position: usize, prompt_len: usize, extra: &mut Vec<f32>) -> u32 {
        let len = self.rope.frequency_len(position, prompt_len);
        if len == self.usual_len {
            return position as u32;
        }
        let current = self.current.take_if(|(current, _)| *current == len);
        let (_, frequencies) =
            self.current.insert(current.unwrap_or_else(|| (len, self.rope.frequencies(len))));
        let (start, width) = (extra.len(), 2 * self.rope.num_frequencies());
        extra.resize(start + width, 0.0);
        write_rotation(position, frequencies, &mut extra[start..]);
        EXTRA | (start / width) as u32
    }
}

/// The factor on the query of `position` with log-n attention (Su 2021, as in Qwen 1): the logarithm of the number of
/// keys to the base of the trained length, at least 1.
pub(crate) fn logn_scale(position: usize, trained_len: usize) -> f32 {
    (((position + 1) as f64).ln() / (trained_len as f64).ln()).max(1.0) as f32
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::error::ModelError;
    use crate::fields::Fields;

    fn rope(config: &Value) -> Result<Rope, ModelError> {
        Rope::from_fields(Fields::new(config), 8, 64)
    }

    #[test]
    fn logn_scale_is_one_up_to_the_trained_length() {
        let scales = [0, 30, 63, 64, 4095].map(|position| logn_scale(position, 64));
        assert_eq!(scales[..3], [1.0; 3]);
        assert!(scales[3] > 1.0 && scales[3] < 1.01, "{scales:?}");
        assert_eq!(scales[4], 2.0);
    }

    #[test]
    fn positions_outside_the_table_have_extra_rotations() {
        let dynamic =
            rope(&json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})).expect("dynamic");
        assert_eq!((dynamic.table_len(1000), dynamic.table_len(20)), (64, 20));
        assert_eq!(rope(&json!({})).expect("default").table_len(1000), 1000);
        let (mut rotations, mut extra) = (ExtraRotations::new(&dynamic), vec![]);
        let mut rotation = |position, prompt_len| rotations.rotation(position, prompt_len, &mut extra);
        assert_eq!([rotation(63, 64), rotation(0, 1)], [63, 0]);
        assert_eq!([rotation(0, 65), rotation(1, 65), rotation(65, 65)], [EXTRA, EXTRA | 1, EXTRA | 2]);
        let expect = |position, len| {
            let mut row = vec![0.0; 8];
            write_rotation(position, &dynamic.frequencies(len), &mut row);
            row
        };
        assert_eq!(extra, [expect(0, 65), expect(1, 65), expect(65, 66)].concat());
        let (table, mut row) = (RopeTable::new(&dynamic, 1000), vec![0.0; 8]);
        table.read(63..64, &mut row);
        assert_eq!(row, expect(63, 64));
    }
}
