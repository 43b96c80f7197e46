//! Descriptions of quantised checkpoints, unsupported methods and damaged parts.

use super::matrix::{COLUMNS, Matrix, ROWS, WEIGHT, changed, compressed_config};
use crate::common::{Tensors, open_error};

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
    let groups: Vec<String> = (0..257).map(|index| format!(r#""{index}":{{}}"#)).collect();
    let many_groups =
        format!(r#"{{"quant_method":"compressed-tensors","config_groups":{{{}}}}}"#, groups.join(","));
    for (config, expected) in [
        (many_groups.as_str(), "quantization_config.config_groups: 257 groups; the limit is 256"),
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
            changed(compressed(), "weight_shape", |_, shape, bytes| {
                shape[0] = 3;
                bytes.extend([0; 8]);
            }),
            &compressed_config,
            "weight_shape: shape [3]; [2] is expected for the sizes of a matrix",
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
