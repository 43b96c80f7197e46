//! Weights in E4M3 with scales per tensor, channel and block.

use penstock_types::{Activations, CodeBits, Minimum, ScaleFormat, WeightFormat};

use super::matrix::{COLUMNS, NAME, ROWS, WEIGHT, check, compressed_config};
use crate::common::Tensors;

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
    let (fp8, float) = (Activations::Fp8, Activations::Float);
    for (config, suffix, shape, activations, index) in [
        (block, "weight_scale_inv", &[2, 3][..], fp8, in_blocks),
        (native, "weight_scale", &[], fp8, (|_, _| 0) as Index),
        (r#"{"quant_method":"modelopt","quant_algo":"FP8"}"#, "weight_scale", &[], fp8, |_, _| 0),
        (native, "weight_scale", &[ROWS, 1], fp8, |row, _| row),
        (&channel, "weight_scale", &[ROWS, 1], fp8, |row, _| row),
        (&blocks, "weight_scale", &[2, 3], float, in_blocks),
        (&text, "weight_scale", &[2, 3], float, in_blocks),
        (&tensor, "weight_scale", &[1], float, |_, _| 0),
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
        assert_eq!((grid.minimum, grid.activations), (Minimum::Centred, activations), "{config}");
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
