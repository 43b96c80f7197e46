//! Every stored type, compared with a naive reference that follows the definition of the format element by element.

use half::{bf16, f16};
use penstock_checkpoint::{Checkpoint, Tensor};
use penstock_types::{Activations, CodeBits, Dtype, Grid, GridRows, Minimum, ScaleFormat, WeightFormat};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::{Gguf, HEAD_DIM, HEADS, read};

const COLUMNS: usize = 512;

/// The definition of a stored type.
#[derive(Debug)]
struct Type {
    name: &'static str,
    ggml_type: u32,
    /// Elements per block.
    elements: usize,
    /// Bytes per block.
    bytes: usize,
    /// Offsets of the half-precision scales in a block.
    halves: &'static [usize],
    /// The i-th element of a block.
    element: fn(&[u8], usize) -> f32,
}

static TYPES: [Type; 15] = [
    Type {
        name: "F32",
        ggml_type: 0,
        elements: 1,
        bytes: 4,
        halves: &[],
        element: |block, _| f32::from_le_bytes(block.try_into().unwrap()),
    },
    Type {
        name: "F16",
        ggml_type: 1,
        elements: 1,
        bytes: 2,
        halves: &[],
        element: |block, _| half_at(block, 0),
    },
    Type {
        name: "BF16",
        ggml_type: 30,
        elements: 1,
        bytes: 2,
        halves: &[],
        element: |block, _| bf16::from_le_bytes(block.try_into().unwrap()).to_f32(),
    },
    Type {
        name: "Q4_0",
        ggml_type: 2,
        elements: 32,
        bytes: 18,
        halves: &[0],
        element: |block, i| half_at(block, 0) * (nibble(&block[2..], i) as i32 - 8) as f32,
    },
    Type {
        name: "Q4_1",
        ggml_type: 3,
        elements: 32,
        bytes: 20,
        halves: &[0, 2],
        element: |block, i| half_at(block, 0) * nibble(&block[4..], i) as f32 + half_at(block, 2),
    },
    Type {
        name: "Q5_0",
        ggml_type: 6,
        elements: 32,
        bytes: 22,
        halves: &[0],
        element: |block, i| half_at(block, 0) * (five_bits(&block[2..], i) as i32 - 16) as f32,
    },
    Type {
        name: "Q5_1",
        ggml_type: 7,
        elements: 32,
        bytes: 24,
        halves: &[0, 2],
        element: |block, i| half_at(block, 0) * five_bits(&block[4..], i) as f32 + half_at(block, 2),
    },
    Type {
        name: "Q8_0",
        ggml_type: 8,
        elements: 32,
        bytes: 34,
        halves: &[0],
        element: |block, i| half_at(block, 0) * f32::from(block[2 + i] as i8),
    },
    Type {
        name: "Q2_K",
        ggml_type: 10,
        elements: 256,
        bytes: 84,
        halves: &[80, 82],
        element: |block, i| {
            let quant = block[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            let (scale, minimum) = (block[i / 16] % 16, block[i / 16] / 16);
            half_at(block, 80) * f32::from(scale) * f32::from(quant) - half_at(block, 82) * f32::from(minimum)
        },
    },
    Type {
        name: "Q3_K",
        ggml_type: 11,
        elements: 256,
        bytes: 110,
        halves: &[108],
        element: |block, i| {
            let low = block[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            let high = block[i % 32] >> (i / 32) & 1;
            let packed = &block[96..108];
            let group = i / 16;
            let scale = packed[group % 8] >> (group / 8 * 4) & 15
                | (packed[8 + group % 4] >> (group / 4 * 2) & 3) << 4;
            half_at(block, 108) * (i32::from(scale) - 32) as f32 * (i32::from(low + 4 * high) - 4) as f32
        },
    },
    Type {
        name: "Q4_K",
        ggml_type: 12,
        elements: 256,
        bytes: 144,
        halves: &[0, 2],
        element: |block, i| scaled(block, i / 32, nibble(&block[16 + i / 64 * 32..][..32], i % 64)),
    },
    Type {
        name: "Q5_K",
        ggml_type: 13,
        elements: 256,
        bytes: 176,
        halves: &[0, 2],
        element: |block, i| {
            let fifth = u32::from(block[16 + i % 32]) >> (i / 32) & 1;
            scaled(block, i / 32, nibble(&block[48 + i / 64 * 32..][..32], i % 64) + 16 * fifth)
        },
    },
    Type {
        name: "Q6_K",
        ggml_type: 14,
        elements: 256,
        bytes: 210,
        halves: &[208],
        element: |block, i| {
            let (half, within) = (i / 128, i % 128);
            let low = u32::from(block[half * 64 + within % 64]) >> (within / 64 * 4) & 15;
            let high = u32::from(block[128 + half * 32 + within % 32]) >> (within / 32 * 2) & 3;
            let scale = half_at(block, 208) * f32::from(block[192 + i / 16] as i8);
            scale * ((low + 16 * high) as i32 - 32) as f32
        },
    },
    Type {
        name: "IQ4_NL",
        ggml_type: 20,
        elements: 32,
        bytes: 18,
        halves: &[0],
        element: |block, i| half_at(block, 0) * IQ4_VALUES[nibble(&block[2..], i) as usize],
    },
    Type {
        name: "IQ4_XS",
        ggml_type: 23,
        elements: 256,
        bytes: 136,
        halves: &[0],
        element: |block, i| {
            let (group, high) = (i / 32, u16::from_le_bytes([block[2], block[3]]));
            let scale =
                u16::from(block[4 + group / 2] >> (group % 2 * 4)) % 16 + (high >> (2 * group)) % 4 * 16;
            let value = IQ4_VALUES[nibble(&block[8 + group * 16..][..16], i % 32) as usize];
            half_at(block, 0) * (f32::from(scale) - 32.0) * value
        },
    },
];

const IQ4_VALUES: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The i-th 4-bit value. All low nibbles come before all high nibbles.
fn nibble(bytes: &[u8], i: usize) -> u32 {
    let half = if bytes.len() < 32 { 16 } else { 32 };
    u32::from(bytes[i % half]) >> (i / half * 4) & 15
}

/// The i-th 5-bit value: four bytes of fifth bits, then the nibbles.
fn five_bits(bytes: &[u8], i: usize) -> u32 {
    nibble(&bytes[4..], i) + 16 * u32::from(bytes[i / 8] >> (i % 8) & 1)
}

/// An element of a group of a 4- or 5-bit K type. The twelve bytes contain eight 6-bit scales and eight 6-bit minima;
/// those of the upper four groups are split.
fn scaled(block: &[u8], group: usize, quant: u32) -> f32 {
    let packed = |byte: usize| u32::from(block[4 + byte]);
    let six_bits = |base: usize, shift: u32| {
        if group < 4 {
            packed(base + group) % 64
        } else {
            (packed(8 + group - 4) >> shift) % 16 + packed(base + group - 4) / 64 * 16
        }
    };
    let (scale, minimum) = (six_bits(0, 0), six_bits(4, 4));
    half_at(block, 0) * scale as f32 * quant as f32 - half_at(block, 2) * minimum as f32
}

/// A type and rows of random blocks. Half-precision scales are finite; all other bits are random.
fn blocks() -> impl Strategy<Value = (&'static Type, Vec<u8>)> {
    let bytes = |(index, rows): (usize, usize)| {
        let kind = &TYPES[index];
        vec(any::<u8>(), rows * COLUMNS / kind.elements * kind.bytes).prop_map(move |mut bytes| {
            for block in bytes.chunks_exact_mut(kind.bytes) {
                kind.halves.iter().for_each(|&at| block[at + 1] &= 0b1111_1011);
            }
            (kind, bytes)
        })
    };
    (0..TYPES.len(), 1..4usize).prop_flat_map(bytes)
}

fn model_with(kind: &Type, bytes: Vec<u8>) -> Checkpoint {
    let rows = bytes.len() / (COLUMNS / kind.elements * kind.bytes);
    let mut file = Gguf::model("qwen2");
    file.tensor("weights", &[COLUMNS, rows], kind.ggml_type, bytes);
    file.open().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_type_matches_the_reference((kind, bytes) in blocks()) {
        let checkpoint = model_with(kind, bytes.clone());
        prop_assert_eq!(checkpoint.tensor("weights").unwrap().stored_type(), kind.name);
        let blocks = bytes.chunks_exact(kind.bytes);
        let expected = blocks.flat_map(|block| (0..kind.elements).map(|i| (kind.element)(block, i)));
        for (at, (ours, expected)) in read(&checkpoint, "weights").into_iter().zip(expected).enumerate() {
            let same = ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan();
            prop_assert!(same, "{} element {at}: {ours} but {expected} is expected", kind.name);
        }
    }
}

/// The grid of a type: bits, group, and whether scales are nested and minima stored.
fn expected_grid(name: &str) -> Option<(CodeBits, u16, bool, bool)> {
    Some(match name {
        "Q4_0" => (CodeBits::Four, 32, false, false),
        "Q4_1" => (CodeBits::Four, 32, false, true),
        "Q5_0" => (CodeBits::Five, 32, false, false),
        "Q5_1" => (CodeBits::Five, 32, false, true),
        "Q8_0" | "IQ4_NL" => (CodeBits::Eight, 32, false, false),
        "Q4_K" => (CodeBits::Four, 32, true, true),
        "Q5_K" => (CodeBits::Five, 32, true, true),
        "Q6_K" => (CodeBits::Six, 16, true, false),
        _ => return None,
    })
}

/// Reads rows as codes with scales, checks them, and returns their weights.
fn read_grid(tensor: &Tensor<'_>, rows: std::ops::Range<usize>) -> Vec<f32> {
    let WeightFormat::Grid(grid) = tensor.format() else { panic!("{tensor:?} has no grid") };
    let (mut codes, columns) = (GridRows::default(), tensor.columns());
    tensor.read_grid(rows.clone(), &mut codes);
    assert_eq!(codes.codes.len(), rows.len() * columns);
    assert!(codes.codes.iter().all(|code| u32::from(*code) < 1 << grid.bits.count()));
    assert_eq!(codes.scales.len(), rows.len() * grid.groups(columns));
    let mut values = vec![f32::NAN; rows.len() * columns];
    for (row, out) in values.chunks_exact_mut(columns).enumerate() {
        codes.dequantize_row(&grid, columns, row, out);
        for (at, value) in out.iter().enumerate() {
            let group = at / usize::from(grid.group.unwrap());
            let (scale, minimum) = codes.scale_and_minimum(&grid, columns, row, group);
            let product = scale * f32::from(codes.codes[row * columns + at]);
            assert_eq!(product + minimum, *value, "{tensor:?}");
            assert_eq!(
                scale.mul_add(f32::from(codes.codes[row * columns + at]), minimum),
                *value,
                "{tensor:?}"
            );
        }
    }
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn codes_and_scales_give_the_values_of_the_rows((kind, bytes) in blocks()) {
        let checkpoint = model_with(kind, bytes);
        let tensor = checkpoint.tensor("weights").unwrap();
        let Some((code_bits, group, nested, stored)) = expected_grid(kind.name) else {
            let dtype = match kind.name {
                "F32" => Dtype::F32,
                "F16" => Dtype::F16,
                _ => Dtype::Bf16,
            };
            prop_assert_eq!(tensor.format(), WeightFormat::Float(dtype));
            return Ok(());
        };
        prop_assert_eq!(tensor.format(), WeightFormat::Grid(Grid {
            bits: code_bits,
            group: Some(group),
            scales: if nested { ScaleFormat::Nested } else { ScaleFormat::F16 },
            minimum: if stored { Minimum::Stored } else { Minimum::Centred },
            activations: Activations::Int8,
        }));
        let rows = read(&checkpoint, "weights");
        prop_assert_eq!(bits(&read_grid(&tensor, 0..tensor.rows())), bits(&rows));
        let last = tensor.rows() - 1;
        prop_assert_eq!(bits(&read_grid(&tensor, last..last + 1)), bits(&rows[last * COLUMNS..]));
    }
}

#[test]
fn interleaved_codes_are_in_the_order_of_the_rows() {
    let mut file = Gguf::model("llama");
    file.tensors.retain(|(name, ..)| name != "blk.0.attn_q.weight");
    let blocks = (0..HEADS * HEAD_DIM).flat_map(|row| {
        f16::from_f32(row as f32).to_le_bytes().into_iter().chain((0..32).map(move |at| at as u8 + row as u8))
    });
    file.tensor("blk.0.attn_q.weight", &[32, HEADS * HEAD_DIM], 8, blocks.collect());
    let checkpoint = file.open().unwrap();
    let name = "model.layers.0.self_attn.q_proj.weight";
    let tensor = checkpoint.tensor(name).unwrap();
    assert_eq!(bits(&read_grid(&tensor, 0..8)), bits(&read(&checkpoint, name)));
    assert_eq!(bits(&read_grid(&tensor, 3..6)), bits(&read(&checkpoint, name)[3 * 32..6 * 32]));
}

#[test]
fn row_range_equals_slice_of_all_rows() {
    for kind in &TYPES {
        let checkpoint = model_with(
            kind,
            (0..5 * COLUMNS / kind.elements * kind.bytes).map(|i| (i * 7 % 120) as u8).collect(),
        );
        let mut part = vec![0.0; 2 * COLUMNS];
        checkpoint.tensor("weights").unwrap().read_rows(2..4, &mut part);
        assert_eq!(
            bits(&part),
            bits(&read(&checkpoint, "weights")[2 * COLUMNS..4 * COLUMNS]),
            "{}",
            kind.name
        );
    }
}
