//! Integer weights: GPTQ, AWQ, AutoRound and compressed-tensors.

use penstock_types::{Activations, CodeBits, Dtype, Grid, Minimum, ScaleFormat, WeightFormat};

use super::matrix::{COLUMNS, Matrix, NAME, ROWS, WEIGHT, changed, check, compressed_config, grid};
use crate::common::{Tensors, read};

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

#[test]
fn scales_that_are_no_numbers_are_values() {
    let matrix = Matrix::new(4, 32, false);
    let tensors = changed(matrix.gptq(1), "scales", |_, _, bytes| bytes.fill(0xff));
    let scratch = tensors.directory(r#"{"quant_method":"gptq","bits":4,"group_size":32}"#);
    assert!(read(&scratch.open().unwrap(), WEIGHT).iter().all(|value| value.is_nan()));
}
