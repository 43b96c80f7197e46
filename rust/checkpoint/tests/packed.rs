//! Quantised safetensors checkpoints: values and codes against the definition of each layout, and damaged files.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Scratch, Tensors, open_error, read};
use half::{bf16, f16};
use penstock_checkpoint::Checkpoint;
use penstock_types::{Activations, CodeBits, Dtype, Grid, GridRows, Minimum, ScaleFormat, WeightFormat};

const ROWS: usize = 24;
const COLUMNS: usize = 96;
const NAME: &str = "model.layers.0.mlp.up_proj";
const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Codes, scales and zero points of a matrix, by row and column or group.
struct Matrix {
    bits: u32,
    group: usize,
    codes: Vec<Vec<u32>>,
    scales: Vec<Vec<f32>>,
    zeros: Vec<Vec<u32>>,
}

impl Matrix {
    /// A matrix with zero points from 1, or with centred codes.
    fn new(bits: u32, group: usize, centred: bool) -> Self {
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

    fn groups(&self) -> usize {
        COLUMNS.div_ceil(self.group)
    }

    fn values(&self) -> Vec<f32> {
        self.values_of(|column| column / self.group)
    }

    fn values_of(&self, group_of: impl Fn(usize) -> usize) -> Vec<f32> {
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

    /// Words of the matrix `code(slow, fast)`, where the `32 / bits` codes of a word are along the slow or the fast axis.
    fn words(
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

    fn transposed_scales(&self) -> Vec<u8> {
        let scales = (0..self.groups()).flat_map(|group| self.scales.iter().map(move |row| row[group]));
        scales.flat_map(|scale| f16::from_f32(scale).to_le_bytes()).collect()
    }

    fn gptq(&self, minus: u32) -> Tensors {
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

    fn awq(&self) -> Tensors {
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

    fn scale_bytes(&self, dtype: &str) -> Vec<u8> {
        let bytes = |scale: &f32| match dtype {
            "F32" => scale.to_le_bytes().to_vec(),
            "F16" => f16::from_f32(*scale).to_le_bytes().to_vec(),
            _ => bf16::from_f32(*scale).to_le_bytes().to_vec(),
        };
        self.scales.iter().flatten().flat_map(bytes).collect()
    }

    fn compressed(&self, dtype: &'static str, with_zeros: bool) -> Tensors {
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

    fn signed_bytes(&self) -> Tensors {
        let mut tensors = Tensors::default();
        let codes = self.codes.iter().flatten().map(|code| *code as u8 ^ 0x80).collect();
        tensors.add(WEIGHT, "I8", &[ROWS, COLUMNS], codes);
        tensors.add(&format!("{NAME}.weight_scale"), "F32", &[ROWS, self.groups()], self.scale_bytes("F32"));
        tensors
    }
}

fn compressed_config(weights: &str, inputs: &str) -> String {
    let group = format!(r#"{{"targets":["Linear"],"weights":{weights},"input_activations":{inputs}}}"#);
    format!(
        r#"{{"quant_method":"compressed-tensors","config_groups":{{"group_0":{group}}},"ignore":["lm_head"],
            "quantization_status":"compressed","kv_cache_scheme":null}}"#
    )
}

fn grid(checkpoint: &Checkpoint) -> Grid {
    match checkpoint.tensor(WEIGHT).unwrap().format() {
        WeightFormat::Grid(grid) => grid,
        WeightFormat::Float(dtype) => panic!("{dtype:?}"),
    }
}

/// Checks the values of the rows, those of the codes, and the codes of a range of rows.
fn check(scratch: &Scratch, expected: &[f32]) -> Checkpoint {
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

#[test]
fn gptq_weights_have_the_values_of_their_layout() {
    for (bits, code_bits) in [(4, CodeBits::Four), (8, CodeBits::Eight)] {
        for (group, group_size) in [(32, 32), (48, 48), (COLUMNS, -1), (64, 64)] {
            for (format, minus) in [("gptq", 1), ("gptq_v2", 0)] {
                let mut matrix = Matrix::new(bits, group, false);
                if bits == 8 && minus == 0 {
                    matrix.zeros[3][0] = 0;
                }
                let config = format!(
                    r#"{{"quant_method":"gptq","bits":{bits},"group_size":{group_size},"desc_act":false,
                        "checkpoint_format":"{format}"}}"#
                );
                let checkpoint = check(&matrix.gptq(minus).directory(&config), &matrix.values());
                let expected = Grid {
                    bits: code_bits,
                    group: (group < COLUMNS).then_some(group as u16),
                    scales: ScaleFormat::F16,
                    minimum: Minimum::ZeroPoint,
                    activations: Activations::Float,
                };
                assert_eq!(grid(&checkpoint), expected);
                assert_eq!(read(&checkpoint, &format!("{NAME}.bias")), [0.0; ROWS]);
            }
        }
    }
}

#[test]
fn equal_central_zero_points_are_not_stored() {
    for bits in [4, 8] {
        let matrix = Matrix::new(bits, 32, true);
        let config = format!(r#"{{"quant_method":"gptq","bits":{bits},"group_size":32,"sym":true}}"#);
        let checkpoint = check(&matrix.gptq(1).directory(&config), &matrix.values());
        assert_eq!(grid(&checkpoint).minimum, Minimum::Centred);
    }
    let matrix = Matrix::new(4, 32, true);
    let checkpoint =
        check(&matrix.awq().directory(r#"{"quant_method":"awq","group_size":32}"#), &matrix.values());
    assert_eq!(grid(&checkpoint).minimum, Minimum::Centred);
}

#[test]
fn columns_in_activation_order_are_read_as_floats() {
    let matrix = Matrix::new(4, 32, false);
    let group_of = |column: usize| column * 7 % 3;
    let index: Vec<_> = (0..COLUMNS).map(|column| group_of(column) as u32).collect();
    let mut tensors = matrix.gptq(1);
    tensors.0.retain(|(name, ..)| !name.ends_with("g_idx"));
    tensors.words(&format!("{NAME}.g_idx"), &[COLUMNS], &index);
    let config = r#"{"quant_method":"gptq","bits":4,"group_size":32,"desc_act":true}"#;
    let checkpoint = check(&tensors.directory(config), &matrix.values_of(group_of));
    assert_eq!(checkpoint.tensor(WEIGHT).unwrap().format(), WeightFormat::Float(Dtype::Bf16));
}

#[test]
fn unset_group_index_means_consecutive_groups() {
    let matrix = Matrix::new(4, 32, false);
    let mut tensors = matrix.gptq(1);
    tensors.0.retain(|(name, ..)| !name.ends_with("g_idx"));
    tensors.words(&format!("{NAME}.g_idx"), &[COLUMNS], &[0; COLUMNS]);
    let config = r#"{"quant_method":"gptq","bits":4,"group_size":32,"desc_act":false}"#;
    check(&tensors.directory(config), &matrix.values());
}

#[test]
fn modules_with_bits_of_their_own_follow_their_shapes() {
    let matrix = Matrix::new(8, 48, false);
    let config =
        r#"{"quant_method":"gptq","bits":4,"group_size":128,"dynamic":{"+:up":{"bits":8,"group_size":48}}}"#;
    check(&matrix.gptq(1).directory(config), &matrix.values());
}

#[test]
fn settings_in_a_file_of_their_own_are_read() {
    let matrix = Matrix::new(4, 32, false);
    let scratch = matrix.gptq(1).directory("null");
    scratch.write("quantize_config.json", r#"{"bits":4,"group_size":32,"desc_act":false}"#);
    check(&scratch, &matrix.values());
}

#[test]
fn auto_round_weights_have_the_layout_of_their_packing() {
    let matrix = Matrix::new(4, 32, false);
    for (packing, tensors) in [
        ("auto_round:auto_gptq", matrix.gptq(1)),
        ("auto_round", matrix.gptq(0)),
        ("auto_round:auto_awq", matrix.awq()),
    ] {
        let config = format!(
            r#"{{"quant_method":"auto-round","bits":4,"group_size":32,"packing_format":"{packing}","data_type":"int",
                "act_bits":16}}"#
        );
        check(&tensors.directory(&config), &matrix.values());
    }
}

#[test]
fn awq_weights_have_the_values_of_their_layout() {
    for (group, group_size) in [(32, 32), (COLUMNS, -1)] {
        let matrix = Matrix::new(4, group, false);
        let config = format!(
            r#"{{"quant_method":"awq","bits":4,"group_size":{group_size},"version":"GEMM","zero_point":true}}"#
        );
        let checkpoint = check(&matrix.awq().directory(&config), &matrix.values());
        assert_eq!((grid(&checkpoint).bits, grid(&checkpoint).minimum), (CodeBits::Four, Minimum::ZeroPoint));
    }
}

#[test]
fn packed_integers_of_compressed_tensors_are_read() {
    for (bits, code_bits) in [(4, CodeBits::Four), (8, CodeBits::Eight)] {
        for (symmetric, dtype, scales) in [(true, "F16", ScaleFormat::F16), (false, "F32", ScaleFormat::F32)]
        {
            for (group, strategy) in [(32, r#""group","group_size":32"#), (COLUMNS, r#""channel""#)] {
                let matrix = Matrix::new(bits, group, symmetric);
                let weights = format!(
                    r#"{{"num_bits":{bits},"type":"int","symmetric":{symmetric},"strategy":{strategy}}}"#
                );
                let config = compressed_config(&weights, "null");
                let checkpoint =
                    check(&matrix.compressed(dtype, !symmetric).directory(&config), &matrix.values());
                let expected = Grid {
                    bits: code_bits,
                    group: (group < COLUMNS).then_some(group as u16),
                    scales,
                    minimum: if symmetric { Minimum::Centred } else { Minimum::ZeroPoint },
                    activations: Activations::Float,
                };
                assert_eq!(grid(&checkpoint), expected);
            }
        }
    }
}

#[test]
fn int8_weights_and_activations_of_compressed_tensors_are_read() {
    for (inputs, activations) in [
        (r#"{"num_bits":8,"type":"int","strategy":"token","dynamic":true}"#, Activations::Int8),
        ("null", Activations::Float),
    ] {
        let matrix = Matrix::new(8, COLUMNS, true);
        let config = compressed_config(r#"{"num_bits":8,"type":"int","strategy":"channel"}"#, inputs);
        let mut tensors = matrix.signed_bytes();
        tensors.add(&format!("{NAME}.input_scale"), "F32", &[1], vec![0; 4]);
        let checkpoint = check(&tensors.directory(&config), &matrix.values());
        assert_eq!(grid(&checkpoint).activations, activations);
        assert!(!checkpoint.has(&format!("{NAME}.input_scale")));

        let mut matrix = Matrix::new(8, COLUMNS, false);
        matrix.zeros[1][0] = 255;
        let mut tensors = matrix.signed_bytes();
        let zeros = matrix.zeros.iter().flatten().map(|zero| *zero as u8 ^ 0x80).collect();
        tensors.add(&format!("{NAME}.weight_zero_point"), "I8", &[ROWS, 1], zeros);
        let weights = r#"{"num_bits":8,"type":"int","strategy":"channel","symmetric":false}"#;
        check(&tensors.directory(&compressed_config(weights, inputs)), &matrix.values());
    }
}

#[test]
fn packed_rows_of_any_length_are_read() {
    const SIZES: [usize; 2] = [13, 45];
    let [rows, columns] = SIZES;
    let (code, zero) = (|row: usize, column: usize| (row * 7 + column) % 16, |row: usize| row % 16);
    let mut words = vec![0_u32; rows * columns.div_ceil(8)];
    let mut zeros = vec![0_u32; rows.div_ceil(8)];
    for row in 0..rows {
        zeros[row / 8] |= (zero(row) as u32) << (row % 8 * 4);
        for column in 0..columns {
            words[row * columns.div_ceil(8) + column / 8] |= (code(row, column) as u32) << (column % 8 * 4);
        }
    }
    let mut tensors = Tensors::default();
    tensors.words("a.weight_packed", &[rows, columns.div_ceil(8)], &words);
    tensors.words("a.weight_shape", &[2], &SIZES.map(|size| size as u32));
    tensors.words("a.weight_zero_point", &[rows.div_ceil(8), 1], &zeros);
    let scales = (0..rows).flat_map(|row| (row as f32).to_le_bytes()).collect();
    tensors.add("a.weight_scale", "F32", &[rows, 1], scales);
    let config = compressed_config(r#"{"num_bits":4,"strategy":"channel","symmetric":false}"#, "null");
    let checkpoint = tensors.directory(&config).open().unwrap();
    assert_eq!(checkpoint.tensor("a.weight").unwrap().shape(), SIZES);
    let difference = |row, column| code(row, column) as f32 - zero(row) as f32;
    let expected: Vec<_> = (0..rows * columns)
        .map(|at| (at / columns) as f32 * difference(at / columns, at % columns))
        .collect();
    assert_eq!(read(&checkpoint, "a.weight"), expected);
}

#[test]
fn group_index_of_compressed_tensors_orders_the_columns() {
    let matrix = Matrix::new(4, 32, true);
    let weights = r#"{"num_bits":4,"strategy":"group","group_size":32,"actorder":"group"}"#;
    let group_of = |column: usize| column * 5 % 3;
    let index: Vec<_> = (0..COLUMNS).map(|column| group_of(column) as u32).collect();
    for (index, values) in [(index, matrix.values_of(group_of)), (vec![u32::MAX; COLUMNS], matrix.values())] {
        let mut tensors = matrix.compressed("BF16", false);
        tensors.0.retain(|(name, ..)| !name.ends_with("weight_scale"));
        tensors.add(&format!("{NAME}.weight_scale"), "F32", &[ROWS, 3], matrix.scale_bytes("F32"));
        tensors.words(&format!("{NAME}.weight_g_idx"), &[COLUMNS], &index);
        check(&tensors.directory(&compressed_config(weights, "null")), &values);
    }
}

#[test]
fn scheme_of_a_module_follows_its_shapes() {
    let mut matrix = Matrix::new(8, COLUMNS, true);
    matrix.scales.iter_mut().for_each(|scales| scales[0] = 0.5);
    let mut tensors = matrix.signed_bytes();
    tensors.0.retain(|(name, ..)| !name.ends_with("weight_scale"));
    tensors.add(&format!("{NAME}.weight_scale"), "F32", &[1], 0.5_f32.to_le_bytes().to_vec());
    let config = r#"{"quant_method":"compressed-tensors","format":"mixed-precision","config_groups":{
        "a":{"weights":{"num_bits":4,"strategy":"group","group_size":32},"format":"pack-quantized"},
        "b":{"weights":{"num_bits":8,"strategy":"tensor"},"input_activations":{"num_bits":8}},
        "c":{"weights":{"num_bits":8,"strategy":"tensor"}},
        "d":{"weights":null,"input_activations":{"num_bits":8}}}}"#;
    let checkpoint = check(&tensors.directory(config), &matrix.values());
    // Two groups fit; they differ in the activations.
    assert_eq!(grid(&checkpoint).activations, Activations::Float);
    let expected = "compressed-tensors, int4, groups of 32; int8, a scale for each tensor; int8, a scale for each \
                    tensor, int8 activations";
    assert_eq!(checkpoint.description().quantization.as_deref(), Some(expected));
}

#[test]
fn parts_in_several_shards_form_one_matrix() {
    let matrix = Matrix::new(4, 32, false);
    let scratch = matrix.gptq(1).directory(r#"{"quant_method":"gptq","bits":4,"group_size":32}"#);
    std::fs::remove_file(scratch.path().join("model.safetensors")).unwrap();
    let mut map = Vec::new();
    for (at, tensor) in matrix.gptq(1).0.into_iter().enumerate() {
        let file = format!("{at}.safetensors");
        map.push(format!(r#""{}":"{file}""#, tensor.0));
        scratch.write(&file, Tensors(vec![tensor]).bytes());
    }
    let map = format!(r#"{{"weight_map":{{{}}}}}"#, map.join(","));
    scratch.write("model.safetensors.index.json", map);
    let checkpoint = check(&scratch, &matrix.values());
    checkpoint.tensor(WEIGHT).unwrap().prefetch();
}

/// The value of an E4M3 code by definition.
fn float8(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// Every code that is a number.
fn float8_codes() -> Vec<u8> {
    (0..ROWS * COLUMNS)
        .map(|at| at as u8)
        .map(|code| if code & 0x7f == 0x7f { code - 1 } else { code })
        .collect()
}

#[test]
fn fp8_weights_with_every_kind_of_scales_are_read() {
    let scale_of = |index: usize| 0.37 * (index as f32 + 1.0);
    type Index = fn(usize, usize) -> usize;
    let block =
        r#"{"quant_method":"fp8","fmt":"e4m3","activation_scheme":"dynamic","weight_block_size":[16,32]}"#;
    let native = r#"{"quant_method":"fp8","activation_scheme":"static"}"#;
    let channel = compressed_config(
        r#"{"num_bits":8,"type":"float","strategy":"channel"}"#,
        r#"{"num_bits":8,"type":"float"}"#,
    );
    let blocks = compressed_config(
        r#"{"num_bits":8,"type":"float","strategy":"block","block_structure":[16,32]}"#,
        "null",
    );
    let text = compressed_config(
        r#"{"num_bits":8,"type":"float","strategy":"block","block_structure":"16x32"}"#,
        "null",
    );
    let tensor = compressed_config(r#"{"num_bits":8,"type":"float"}"#, "null");
    let in_blocks: Index = |row, column| row / 16 * 3 + column / 32;
    for (config, suffix, shape, index) in [
        (block, "weight_scale_inv", &[2, 3][..], in_blocks),
        (native, "weight_scale", &[], (|_, _| 0) as Index),
        (r#"{"quant_method":"modelopt","quant_algo":"FP8"}"#, "weight_scale", &[], |_, _| 0),
        (native, "weight_scale", &[ROWS, 1], |row, _| row),
        (&channel, "weight_scale", &[ROWS, 1], |row, _| row),
        (&blocks, "weight_scale", &[2, 3], in_blocks),
        (&text, "weight_scale", &[2, 3], in_blocks),
        (&tensor, "weight_scale", &[1], |_, _| 0),
    ] {
        let codes = float8_codes();
        let mut tensors = Tensors::default();
        tensors.add(WEIGHT, "F8_E4M3", &[ROWS, COLUMNS], codes.clone());
        let scales = (0..shape.iter().product()).flat_map(|at| scale_of(at).to_le_bytes()).collect();
        tensors.add(&format!("{NAME}.{suffix}"), "F32", shape, scales);
        tensors.add(&format!("{NAME}.input_scale"), "F32", &[], vec![0; 4]);
        let value = |(at, code): (usize, &u8)| scale_of(index(at / COLUMNS, at % COLUMNS)) * float8(*code);
        let expected: Vec<_> = codes.iter().enumerate().map(value).collect();
        let checkpoint = check(&tensors.directory(config), &expected);
        let WeightFormat::Grid(grid) = checkpoint.tensor(WEIGHT).unwrap().format() else {
            panic!("{config}: not in 8 bits");
        };
        assert_eq!((grid.bits, grid.scales), (CodeBits::E4m3, ScaleFormat::F32));
        assert_eq!((grid.minimum, grid.activations), (Minimum::Centred, Activations::Float));
        assert_eq!(grid.group, (shape == [2, 3]).then_some(32), "{config}");
        assert_eq!(checkpoint.description().storage[0], ("F8_E4M3".to_owned(), (ROWS * COLUMNS) as u64));
    }
}

#[test]
fn fp8_weights_with_large_scales_are_plain_numbers() {
    for (scale, is_grid) in [(127.9_f32, true), (-127.9, true), (128.0, false), (f32::NAN, false)] {
        let mut tensors = Tensors::default();
        tensors.add(WEIGHT, "F8_E4M3", &[ROWS, COLUMNS], float8_codes());
        tensors.add(&format!("{NAME}.weight_scale"), "F32", &[], scale.to_le_bytes().to_vec());
        let checkpoint = tensors.directory(r#"{"quant_method":"fp8"}"#).open().unwrap();
        let format = checkpoint.tensor(WEIGHT).unwrap().format();
        assert_eq!(matches!(format, WeightFormat::Grid(_)), is_grid, "{scale}");
    }
}

#[test]
fn description_names_the_method_and_its_parameters() {
    let matrix = Matrix::new(4, 32, false);
    let describe = |tensors: Tensors, config: &str| tensors.directory(config).open().unwrap().description();
    let gptq = describe(matrix.gptq(1), r#"{"quant_method":"gptq","bits":4,"group_size":32}"#);
    assert_eq!(gptq.quantization.as_deref(), Some("GPTQ, 4 bits, groups of 32"));
    assert_eq!(gptq.storage[0], ("INT4".to_owned(), (ROWS * COLUMNS) as u64));
    let config =
        compressed_config(r#"{"num_bits":8,"type":"int","strategy":"channel"}"#, r#"{"num_bits":8}"#);
    let int8 = describe(Matrix::new(8, COLUMNS, true).signed_bytes(), &config);
    let expected = "compressed-tensors, int8, a scale for each row, int8 activations";
    assert_eq!(int8.quantization.as_deref(), Some(expected));
    assert_eq!(int8.bytes, (ROWS * COLUMNS + 4 * ROWS) as u64);
}

#[test]
fn unsupported_methods_and_options_are_named() {
    let gptq = Matrix::new(4, 32, false).gptq(1);
    for (config, expected) in [
        (
            r#"{"quant_method":"bitsandbytes"}"#,
            "quantization_config.quant_method is bitsandbytes; supported: awq",
        ),
        (r#"{"quant_method":"mxfp4"}"#, "quant_method is mxfp4"),
        (r#"{"group_size":64,"bits":4}"#, "quantization_config.quant_method: missing"),
        (r#"4"#, "config.json: quantization_config: 4; an object is expected"),
        (r#"{"quant_method":"gptq","bits":3}"#, "quantization_config.bits is 3; supported: 4, 8"),
        (r#"{"quant_method":"gptq","bits":"4"}"#, "quantization_config.bits: \"4\"; an integer is expected"),
        (r#"{"quant_method":"gptq","bits":4,"group_size":0}"#, "group_size: 0; -1 or a positive number"),
        (r#"{"quant_method":"gptq","bits":4,"checkpoint_format":"marlin"}"#, "checkpoint_format is marlin"),
        (r#"{"quant_method":"gptq","bits":4,"is_marlin_format":true}"#, "is_marlin_format is true"),
        (r#"{"quant_method":"gptq","bits":4,"pack_dtype":"int16"}"#, "pack_dtype is int16"),
        (r#"{"quant_method":"awq","bits":8}"#, "quantization_config.bits is 8; supported: 4"),
        (r#"{"quant_method":"awq","bits":4,"version":"gemv"}"#, "version is gemv; supported: gemm"),
        (r#"{"quant_method":"auto-round","bits":4,"data_type":"mx_fp"}"#, "data_type is mx_fp"),
        (r#"{"quant_method":"auto-round","bits":4,"packing_format":"x"}"#, "packing_format is x"),
        (r#"{"quant_method":"modelopt","quant_algo":"NVFP4"}"#, "quant_algo is NVFP4; supported: FP8"),
        (r#"{"quant_method":"fp8","fmt":"e5m2"}"#, "quantization_config.fmt is e5m2; supported: e4m3"),
        (r#"{"quant_method":"fp8"}"#, "up_proj.qweight: no weight of the method fp8 has this part"),
        (
            r#"{"quant_method":"fp8","weight_block_size":[0,1]}"#,
            "weight_block_size: [0,1]; a list of two positive",
        ),
        (
            r#"{"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized"}"#,
            "quantization_config.format is nvfp4-pack-quantized; supported: pack-quantized",
        ),
        (r#"{"quant_method":"compressed-tensors"}"#, "quantization_config.config_groups: missing"),
        (
            r#"{"quant_method":"compressed-tensors","sparsity_config":{"format":"sparse-24-bitmask"}}"#,
            "sparsity_config.format is sparse-24-bitmask; supported: dense",
        ),
        (
            r#"{"quant_method":"compressed-tensors","transform_config":{"config_groups":{"a":{}}}}"#,
            "transform_config.config_groups is {\"a\":{}}; supported: null",
        ),
        (
            &compressed_config(r#"{"num_bits":4,"type":"float"}"#, "null"),
            "weights.num_bits is 4; supported: 8",
        ),
        (&compressed_config(r#"{"num_bits":3}"#, "null"), "group_0.weights.num_bits is 3; supported: 4, 8"),
        (&compressed_config(r#"{"strategy":"tensor_group"}"#, "null"), "weights.strategy is tensor_group"),
        (&compressed_config(r#"{"strategy":"group"}"#, "null"), "weights.group_size: missing"),
        (&compressed_config("{}", r#"{"num_bits":4}"#), "input_activations.num_bits is 4; supported: 8"),
    ] {
        let message = open_error(gptq.directory(config).open());
        assert!(message.contains(expected), "{message}\n{expected}");
    }
}

#[test]
fn settings_beside_plain_weights_are_rejected() {
    let mut tensors = Tensors::default();
    tensors.add(WEIGHT, "F16", &[1, 1], vec![0; 2]);
    let message = open_error(tensors.directory(r#"{"quant_method":"fp8"}"#).open());
    assert!(message.contains("quant_method: fp8; no tensor is quantised with this method"), "{message}");
}

/// Tensors after a change of the shape or the contents of one of them.
fn changed(
    mut tensors: Tensors,
    suffix: &str,
    change: impl Fn(&mut &'static str, &mut Vec<usize>, &mut Vec<u8>),
) -> Tensors {
    let (_, dtype, shape, bytes) = tensors.0.iter_mut().find(|(name, ..)| name.ends_with(suffix)).unwrap();
    change(dtype, shape, bytes);
    tensors
}

#[test]
fn damaged_parts_are_rejected() {
    let gptq = || Matrix::new(4, 32, false).gptq(1);
    let gptq_config = r#"{"quant_method":"gptq","bits":4,"group_size":32,"desc_act":true}"#;
    let awq = || Matrix::new(4, 32, false).awq();
    let awq_config = r#"{"quant_method":"awq","bits":4,"group_size":32}"#;
    let compressed = || Matrix::new(4, 32, false).compressed("F16", true);
    let compressed_config =
        compressed_config(r#"{"num_bits":4,"strategy":"group","group_size":32,"symmetric":false}"#, "null");
    let without = |mut tensors: Tensors, suffix: &str| {
        tensors.0.retain(|(name, ..)| !name.ends_with(suffix));
        tensors
    };
    let flat =
        |_: &mut &'static str, shape: &mut Vec<usize>, _: &mut Vec<u8>| *shape = vec![shape.iter().product()];
    let turned = |_: &mut &'static str, shape: &mut Vec<usize>, _: &mut Vec<u8>| shape.reverse();
    let renamed = |name: &'static str| {
        move |dtype: &mut &'static str, _: &mut Vec<usize>, _: &mut Vec<u8>| *dtype = name
    };
    let empty = |_: &mut &'static str, shape: &mut Vec<usize>, bytes: &mut Vec<u8>| {
        (shape[0], *bytes) = (0, Vec::new());
    };
    let all_ones = |_: &mut &'static str, _: &mut Vec<usize>, bytes: &mut Vec<u8>| bytes.fill(0xff);
    for (tensors, config, expected) in [
        (without(gptq(), "qweight"), gptq_config, "no tensor named model.layers.0.mlp.up_proj.qweight"),
        (without(gptq(), "qzeros"), gptq_config, "no tensor named model.layers.0.mlp.up_proj.qzeros"),
        (without(gptq(), "scales"), gptq_config, "no tensor named model.layers.0.mlp.up_proj.scales"),
        (changed(gptq(), "qweight", flat), gptq_config, "qweight: shape [288]; two positive dimensions"),
        (
            changed(gptq(), "qweight", turned),
            gptq_config,
            "qweight: 12 output features; a multiple of 8 is expected",
        ),
        (changed(gptq(), "qzeros", flat), gptq_config, "up_proj.qzeros: shape [9]; two positive"),
        (changed(gptq(), "scales", turned), gptq_config, "scales: shape [24, 3]; [3, 24] is expected"),
        (changed(gptq(), "scales", renamed("I16")), gptq_config, "scales is I16; supported: F32, F16, BF16"),
        (changed(gptq(), "qweight", renamed("F32")), gptq_config, "qweight is F32; supported: I32"),
        (changed(gptq(), "qweight", empty), gptq_config, "qweight: shape [0, 24]; two positive dimensions"),
        (changed(gptq(), "qzeros", empty), gptq_config, "qzeros: shape [0, 3]; two positive dimensions"),
        (
            changed(gptq(), "g_idx", all_ones),
            r#"{"quant_method":"gptq","bits":4,"group_size":64}"#,
            "qzeros: shape [3, 3]; [2, 3] is expected",
        ),
        (
            changed(gptq(), "g_idx", |_, _, bytes| bytes[1] = 1),
            gptq_config,
            "g_idx: group 256; the limit is 2",
        ),
        (
            changed(gptq(), "g_idx", |_, shape, bytes| {
                shape[0] -= 1;
                bytes.truncate(4 * shape[0]);
            }),
            gptq_config,
            "g_idx: shape [95]; [96] is expected",
        ),
        (
            changed(Matrix::new(8, 32, false).gptq(1), "qzeros", all_ones),
            r#"{"quant_method":"gptq","bits":8,"group_size":32}"#,
            "qzeros: a zero point is 256",
        ),
        (without(awq(), "qzeros"), awq_config, "no tensor named model.layers.0.mlp.up_proj.qzeros"),
        (changed(awq(), "qweight", turned), awq_config, "is expected for a matrix 768x3 of 4 bits"),
        (changed(awq(), "scales", flat), awq_config, "scales: shape [72]; [3, 24] is expected"),
        (without(compressed(), "weight_shape"), &compressed_config, "up_proj.weight_shape"),
        (without(compressed(), "weight_scale"), &compressed_config, "up_proj.weight_scale"),
        (without(compressed(), "weight_zero_point"), &compressed_config, "up_proj.weight_zero_point"),
        (
            without(compressed(), "weight_packed"),
            &compressed_config,
            "weight_scale: no weight of the method compressed-tensors has this part",
        ),
        (
            changed(compressed(), "weight_shape", |_, _, bytes| bytes[0] += 1),
            &compressed_config,
            "weight_shape: [25, 96]; weight_packed has 24 rows",
        ),
        (
            changed(compressed(), "weight_shape", |_, _, bytes| bytes[15] = 0x80),
            &compressed_config,
            "weight_packed has 24 rows",
        ),
        (
            changed(compressed(), "weight_shape", |_, _, bytes| bytes[8] += 8),
            &compressed_config,
            "12 words in a row; no config group",
        ),
        (
            changed(compressed(), "weight_shape", |_, _, bytes| bytes.fill(0x7f)),
            &compressed_config,
            "weight_packed has 24 rows",
        ),
        (
            changed(compressed(), "weight_scale", turned),
            &compressed_config,
            "weight_scale: shape [3, 24]; no config group",
        ),
        (
            changed(compressed(), "weight_zero_point", flat),
            &compressed_config,
            "weight_zero_point: shape [9]; two positive",
        ),
        (
            gptq(),
            "null",
            "up_proj.qweight: a part of a quantised weight, but config.json has no quantization_config",
        ),
    ] {
        let message = open_error(tensors.directory(config).open());
        assert!(message.contains(expected), "{message}\n{expected}");
    }
}

#[test]
fn weight_beside_its_quantised_form_is_rejected() {
    let mut tensors = Matrix::new(4, 32, false).gptq(1);
    tensors.add(WEIGHT, "F16", &[1], vec![0; 2]);
    let message = open_error(tensors.directory(r#"{"quant_method":"gptq","bits":4,"group_size":32}"#).open());
    assert!(message.contains("up_proj.weight: the module also has a quantised weight"), "{message}");
}

#[test]
fn scales_that_are_no_numbers_are_values() {
    let matrix = Matrix::new(4, 32, false);
    let tensors = changed(matrix.gptq(1), "scales", |_, _, bytes| bytes.fill(0xff));
    let scratch = tensors.directory(r#"{"quant_method":"gptq","bits":4,"group_size":32}"#);
    assert!(read(&scratch.open().unwrap(), WEIGHT).iter().all(|value| value.is_nan()));
}
