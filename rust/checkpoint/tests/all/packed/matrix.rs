//! Matrices in the layouts of quantised checkpoints.

use half::{bf16, f16};
use penstock_checkpoint::Checkpoint;
use penstock_types::{Grid, GridRows, WeightFormat};

use crate::common::{Scratch, Tensors, read};

pub const ROWS: usize = 24;
pub const COLUMNS: usize = 96;
pub const NAME: &str = "model.layers.0.mlp.up_proj";
pub const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";
pub const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Codes, scales and zero points of a matrix, by row and column or group.
pub struct Matrix {
    pub bits: u32,
    pub group: usize,
    pub codes: Vec<Vec<u32>>,
    pub scales: Vec<Vec<f32>>,
    pub zeros: Vec<Vec<u32>>,
}

impl Matrix {
    /// A matrix with zero points from 1, or with centred codes.
    pub fn new(bits: u32, group: usize, centred: bool) -> Self {
        let mut state = 1_u32;
        let mut random = move |limit: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % limit
        };
        let groups = COLUMNS.div_ceil(group);
        let mut matrix = Matrix { bits, group, codes: vec![], scales: vec![], zeros: vec![] };
        for _ in 0..ROWS {
            matrix.codes.push((0..COLUMNS).map(|_| random(1 << bits)).collect());
            // Subnormal, negative and ordinary scales.
            let scale = |random: u32| f16::from_bits((random * 31) as u16 & 0xbbff).to_f32();
            matrix.scales.push((0..groups).map(|_| scale(random(2000))).collect());
            let zero = |random: u32| if centred { 1 << (bits - 1) } else { 1 + random };
            matrix.zeros.push((0..groups).map(|_| zero(random((1 << bits) - 1))).collect());
        }
        matrix
    }

    pub fn groups(&self) -> usize {
        COLUMNS.div_ceil(self.group)
    }

    pub fn values(&self) -> Vec<f32> {
        self.values_of(|column| column / self.group)
    }

    pub fn values_of(&self, group_of: impl Fn(usize) -> usize) -> Vec<f32> {
        let value = |row: usize, column: usize| {
            let group = group_of(column);
            let difference = self.codes[row][column] as f32 - self.zeros[row][group] as f32;
            self.scales[row][group] * difference
        };
        (0..ROWS)
            .flat_map(|row| (0..COLUMNS).map(move |column| (row, column)))
            .map(|(r, c)| value(r, c))
            .collect()
    }

    /// Words of the matrix `code(slow, fast)`, where the `32 / bits` codes of a word are along the slow or the fast
    /// axis.
    pub fn words(
        &self,
        slow: usize,
        fast: usize,
        along_fast: bool,
        code: impl Fn(usize, usize) -> u32,
    ) -> Vec<u32> {
        let count = 32 / self.bits as usize;
        let (outer, inner) =
            if along_fast { (slow, fast.div_ceil(count)) } else { (slow.div_ceil(count), fast) };
        let mut words = vec![0; outer * inner];
        for i in 0..slow {
            for j in 0..fast {
                let (word, at) = if along_fast {
                    (i * inner + j / count, j % count)
                } else {
                    (i / count * inner + j, i % count)
                };
                words[word] |= code(i, j) << (at as u32 * self.bits);
            }
        }
        words
    }

    pub fn transposed_scales(&self) -> Vec<u8> {
        let scales = (0..self.groups()).flat_map(|group| self.scales.iter().map(move |row| row[group]));
        scales.flat_map(|scale| f16::from_f32(scale).to_le_bytes()).collect()
    }

    pub fn gptq(&self, minus: u32) -> Tensors {
        let (count, groups) = (32 / self.bits as usize, self.groups());
        let mut tensors = Tensors::default();
        let words = self.words(COLUMNS, ROWS, false, |column, row| self.codes[row][column]);
        tensors.words(&format!("{NAME}.qweight"), &[COLUMNS / count, ROWS], &words);
        let words = self.words(groups, ROWS, true, |group, row| self.zeros[row][group] - minus);
        tensors.words(&format!("{NAME}.qzeros"), &[groups, ROWS / count], &words);
        tensors.add(&format!("{NAME}.scales"), "F16", &[groups, ROWS], self.transposed_scales());
        let index: Vec<_> = (0..COLUMNS).map(|column| (column / self.group) as u32).collect();
        tensors.words(&format!("{NAME}.g_idx"), &[COLUMNS], &index);
        tensors.add(&format!("{NAME}.bias"), "F16", &[ROWS], vec![0; 2 * ROWS]);
        tensors.add("model.norm.weight", "F32", &[2], vec![0; 8]);
        tensors
    }

    pub fn awq(&self) -> Tensors {
        let groups = self.groups();
        let order = |row: usize| row / 8 * 8 + AWQ_ORDER[row % 8];
        let mut tensors = Tensors::default();
        let words = self.words(COLUMNS, ROWS, true, |column, row| self.codes[order(row)][column]);
        tensors.words(&format!("{NAME}.qweight"), &[COLUMNS, ROWS / 8], &words);
        let words = self.words(groups, ROWS, true, |group, row| self.zeros[order(row)][group]);
        tensors.words(&format!("{NAME}.qzeros"), &[groups, ROWS / 8], &words);
        tensors.add(&format!("{NAME}.scales"), "F16", &[groups, ROWS], self.transposed_scales());
        tensors
    }

    pub fn scale_bytes(&self, dtype: &str) -> Vec<u8> {
        let bytes = |scale: &f32| match dtype {
            "F32" => scale.to_le_bytes().to_vec(),
            "F16" => f16::from_f32(*scale).to_le_bytes().to_vec(),
            _ => bf16::from_f32(*scale).to_le_bytes().to_vec(),
        };
        self.scales.iter().flatten().flat_map(bytes).collect()
    }

    pub fn compressed(&self, dtype: &'static str, with_zeros: bool) -> Tensors {
        let (count, groups) = (32 / self.bits as usize, self.groups());
        let mut tensors = Tensors::default();
        let words = self.words(ROWS, COLUMNS, true, |row, column| self.codes[row][column]);
        tensors.words(&format!("{NAME}.weight_packed"), &[ROWS, COLUMNS / count], &words);
        let shape = [ROWS, COLUMNS].iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
        tensors.add(&format!("{NAME}.weight_shape"), "I64", &[2], shape);
        tensors.add(&format!("{NAME}.weight_scale"), dtype, &[ROWS, groups], self.scale_bytes(dtype));
        if with_zeros {
            let words = self.words(ROWS, groups, false, |row, group| self.zeros[row][group]);
            tensors.words(&format!("{NAME}.weight_zero_point"), &[ROWS / count, groups], &words);
        }
        tensors
    }

    pub fn signed_bytes(&self) -> Tensors {
        let mut tensors = Tensors::default();
        let codes = self.codes.iter().flatten().map(|code| *code as u8 ^ 0x80).collect();
        tensors.add(WEIGHT, "I8", &[ROWS, COLUMNS], codes);
        tensors.add(&format!("{NAME}.weight_scale"), "F32", &[ROWS, self.groups()], self.scale_bytes("F32"));
        tensors
    }
}

pub fn compressed_config(weights: &str, inputs: &str) -> String {
    let group = format!(r#"{{"targets":["Linear"],"weights":{weights},"input_activations":{inputs}}}"#);
    format!(
        r#"{{"quant_method":"compressed-tensors","config_groups":{{"group_0":{group}}},"ignore":["lm_head"],
            "quantization_status":"compressed","kv_cache_scheme":null}}"#
    )
}

pub fn grid(checkpoint: &Checkpoint) -> Grid {
    match checkpoint.tensor(WEIGHT).unwrap().format() {
        WeightFormat::Grid(grid) => grid,
        WeightFormat::Float(dtype) => panic!("{dtype:?}"),
    }
}

/// Checks the values of the rows, those of the codes, and the codes of a range of rows.
pub fn check(scratch: &Scratch, expected: &[f32]) -> Checkpoint {
    let checkpoint = scratch.open().unwrap();
    let tensor = checkpoint.tensor(WEIGHT).unwrap();
    assert_eq!(tensor.shape(), [ROWS, COLUMNS]);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&read(&checkpoint, WEIGHT)), bits(expected));
    let mut part = vec![0.0; 3 * COLUMNS];
    tensor.read_rows(9..12, &mut part);
    assert_eq!(bits(&part), bits(&expected[9 * COLUMNS..12 * COLUMNS]));
    if let WeightFormat::Grid(grid) = tensor.format() {
        for rows in [0..ROWS, 7..9] {
            let mut codes = GridRows::default();
            tensor.read_grid(rows.clone(), &mut codes);
            for (at, row) in rows.enumerate() {
                let mut values = [0.0; COLUMNS];
                codes.dequantize_row(&grid, COLUMNS, at, &mut values);
                assert_eq!(bits(&values), bits(&expected[row * COLUMNS..][..COLUMNS]));
            }
        }
    }
    assert!(checkpoint.config().get("quantization_config").is_none_or(|value| value.is_null()));
    checkpoint
}

/// Tensors after a change of the shape or the contents of one of them.
pub fn changed(
    mut tensors: Tensors,
    suffix: &str,
    change: impl Fn(&mut &'static str, &mut Vec<usize>, &mut Vec<u8>),
) -> Tensors {
    let (_, dtype, shape, bytes) = tensors.0.iter_mut().find(|(name, ..)| name.ends_with(suffix)).unwrap();
    change(dtype, shape, bytes);
    tensors
}
