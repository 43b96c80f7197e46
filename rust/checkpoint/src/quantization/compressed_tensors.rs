//! compressed-tensors: `weight_packed` (integers in words), or `weight` of 8-bit integers or floating-point numbers,
//! with `weight_scale` and `weight_zero_point`.

use std::collections::BTreeSet;

use penstock_types::{Activations, CodeBits};

use super::gptq::all_codes_are;
use super::parts::{Part, Parts};
use super::scales::{Sharing, column_groups};
use super::settings::Settings;
use super::{describe_groups, fp8};
use crate::error::CheckpointError;
use crate::packed::{CodeOrder, PackedMatrix, Zeros};

const FORMATS: &str = "pack-quantized, int-quantized, float-quantized, naive-quantized";

/// Most config groups. Each matrix is compared with all of them.
const MAX_CONFIG_GROUPS: usize = 256;

/// The quantisation of the weights of a config group.
struct Scheme {
    bits: u32,
    float: bool,
    sharing: Sharing,
    symmetric: bool,
    activations: Activations,
}

pub(super) fn read(settings: &Settings<'_>, parts: &mut Parts<'_>) -> Result<String, CheckpointError> {
    match settings.text("format")? {
        Some("mixed-precision") => {}
        _ => check_format(settings)?,
    }
    if let Some(sparsity) = settings.object("sparsity_config")?
        && let Some(format) = sparsity.text("format")?.filter(|format| *format != "dense")
    {
        return Err(sparsity.unsupported("format", format, "dense"));
    }
    if let Some(transform) = settings.object("transform_config")? {
        transform.reject("config_groups")?;
    }
    let Some(groups) = settings.object("config_groups")? else {
        return Err(settings.malformed("config_groups", "missing"));
    };
    let groups = groups.objects()?;
    if groups.len() > MAX_CONFIG_GROUPS {
        let problem = format!("{} groups; the limit is {MAX_CONFIG_GROUPS}", groups.len());
        return Err(settings.malformed("config_groups", problem));
    }
    let schemes = groups.into_iter().filter_map(|group| scheme(&group).transpose());
    let schemes = schemes.collect::<Result<Vec<_>, _>>()?;

    for module in parts.modules(&["weight_packed"]) {
        let matrix = packed(&module, parts, &schemes)?;
        parts.insert(&module, matrix)?;
    }
    for module in parts.modules_of("I8") {
        let matrix = integers(&module, parts, &schemes)?;
        parts.insert(&module, matrix)?;
    }
    for module in parts.modules_of(fp8::DTYPE) {
        let matrix = floats(&module, parts, &schemes)?;
        parts.insert(&module, matrix)?;
    }
    let names: BTreeSet<String> = schemes.iter().map(Scheme::describe).collect();
    Ok(format!("compressed-tensors, {}", names.into_iter().collect::<Vec<_>>().join("; ")))
}

fn check_format(settings: &Settings<'_>) -> Result<(), CheckpointError> {
    match settings.text("format")? {
        None | Some("pack-quantized" | "int-quantized" | "float-quantized" | "naive-quantized") => Ok(()),
        Some(other) => Err(settings.unsupported("format", other, FORMATS)),
    }
}

/// The scheme of a config group; `None` if it does not quantise weights.
fn scheme(group: &Settings<'_>) -> Result<Option<Scheme>, CheckpointError> {
    let Some(weights) = group.object("weights")? else { return Ok(None) };
    check_format(group)?;
    group.reject("output_activations")?;
    weights.reject("dynamic")?;
    let float = match weights.text("type")? {
        None | Some("int") => false,
        Some("float") => true,
        Some(other) => return Err(weights.unsupported("type", other, "int, float")),
    };
    let bits = weights.integer("num_bits")?.unwrap_or(8);
    let supported = if float { "8" } else { "4, 8" };
    if !(bits == 8 || bits == 4 && !float) {
        return Err(weights.unsupported("num_bits", &bits.to_string(), supported));
    }
    let symmetric = weights.bool("symmetric")?.unwrap_or(true);
    if float && !symmetric {
        return Err(weights.unsupported("symmetric", "false", "true for type float"));
    }
    Ok(Some(Scheme {
        bits: bits as u32,
        float,
        sharing: sharing(&weights)?,
        symmetric,
        activations: activations(group, float)?,
    }))
}

fn sharing(weights: &Settings<'_>) -> Result<Sharing, CheckpointError> {
    let group_size = weights.group_size()?;
    let strategy = weights.text("strategy")?.unwrap_or(match group_size {
        None => "tensor",
        Some(None) => "channel",
        Some(Some(_)) => "group",
    });
    match (strategy, group_size) {
        ("tensor", _) => Ok(Sharing::Tensor),
        ("channel", _) => Ok(Sharing::Row),
        ("group", Some(Some(size))) => Ok(Sharing::Group(size)),
        ("group", _) => Err(weights.malformed("group_size", "missing; strategy group requires it")),
        ("block", _) => match weights.block("block_structure")? {
            Some((rows, columns)) => Ok(Sharing::Block(rows, columns)),
            None => Err(weights.malformed("block_structure", "missing; strategy block requires it")),
        },
        (other, _) => Err(weights.unsupported("strategy", other, "tensor, channel, group, block")),
    }
}

/// The activations of a group: 8-bit integers, or 8-bit floats if its weights are `float`, too. Otherwise they are not
/// rounded.
fn activations(group: &Settings<'_>, float: bool) -> Result<Activations, CheckpointError> {
    let Some(inputs) = group.object("input_activations")? else { return Ok(Activations::Float) };
    let bits = inputs.integer("num_bits")?.unwrap_or(8);
    match (inputs.text("type")?.unwrap_or("int"), bits) {
        ("int", 8) => Ok(Activations::Int8),
        ("float", 8) if float => Ok(Activations::Fp8),
        ("float", 8) | (_, 16) => Ok(Activations::Float),
        _ => Err(inputs.unsupported("num_bits", &bits.to_string(), "8")),
    }
}

impl Scheme {
    fn describe(&self) -> String {
        let kind = if self.float { "float" } else { "int" };
        let sharing = match self.sharing {
            Sharing::Tensor => "a scale for each tensor".to_owned(),
            Sharing::Row => describe_groups(None),
            Sharing::Group(width) => describe_groups(Some(width)),
            Sharing::Block(rows, columns) => format!("blocks of {rows}x{columns}"),
        };
        let activations = match self.activations {
            Activations::Int8 => ", int8 activations",
            Activations::Fp8 => ", fp8 activations",
            Activations::Float => "",
        };
        format!("{kind}{}, {sharing}{activations}", self.bits)
    }
}

/// The only scheme that fits a matrix and its scales. Config groups that differ in the activations alone count as one,
/// with floating-point activations.
fn find_scheme(
    schemes: &[Scheme],
    scale: &Part<'_>,
    [rows, columns]: [usize; 2],
    float: bool,
    bits: u32,
) -> Result<Scheme, CheckpointError> {
    let fitting: Vec<_> = schemes
        .iter()
        .filter(|scheme| scheme.float == float && scheme.bits == bits)
        .filter(|scheme| scheme.sharing.fits(&scale.shape, rows, columns))
        .collect();
    let kind = if float { "float" } else { "int" };
    let [first, rest @ ..] = &fitting[..] else {
        let problem = format!(
            "shape {:?}; no config group has these scales for a matrix {rows}x{columns} of {kind}{bits}",
            scale.shape
        );
        return Err(scale.malformed(problem));
    };
    if rest.iter().any(|other| other.sharing != first.sharing) {
        let problem = format!("shape {:?}; several config groups have these scales", scale.shape);
        return Err(scale.malformed(problem));
    }
    let same_activations = rest.iter().all(|other| other.activations == first.activations);
    Ok(Scheme {
        bits,
        float,
        sharing: first.sharing,
        symmetric: fitting.iter().any(|scheme| scheme.symmetric),
        activations: if same_activations { first.activations } else { Activations::Float },
    })
}

/// A weight of words: rows of codes, lowest bits first.
fn packed(module: &str, parts: &mut Parts<'_>, schemes: &[Scheme]) -> Result<PackedMatrix, CheckpointError> {
    let weight = parts.require(module, "weight_packed")?;
    let shape = parts.require(module, "weight_shape")?;
    let scale = parts.require(module, "weight_scale")?;
    let [rows, words] = weight.words()?;
    shape.expect_shape(&[2], "the sizes of a matrix")?;
    let sizes = shape.integers()?;
    let columns = match sizes[..] {
        [found, columns] if found == rows as i64 && columns > 0 => columns as usize,
        _ => return Err(shape.malformed(format!("{sizes:?}; weight_packed has {rows} rows"))),
    };
    let code_bits = [CodeBits::Four, CodeBits::Eight];
    let fits = |bits: &CodeBits| columns.div_ceil(32 / bits.count() as usize) == words;
    let has = |bits: &CodeBits| schemes.iter().any(|scheme| !scheme.float && scheme.bits == bits.count());
    let Some(bits) = code_bits.into_iter().find(|bits| fits(bits) && has(bits)) else {
        let problem = format!("{words} words in a row; no config group has these for {columns} columns");
        return Err(weight.malformed(problem));
    };
    let order = if bits == CodeBits::Four { CodeOrder::Nibbles } else { CodeOrder::Bytes };
    quantised(module, parts, schemes, [rows, columns], (&weight, order), &scale)
}

/// A weight of signed bytes.
fn integers(
    module: &str,
    parts: &mut Parts<'_>,
    schemes: &[Scheme],
) -> Result<PackedMatrix, CheckpointError> {
    let weight = parts.require(module, "weight")?;
    let scale = parts.require(module, "weight_scale")?;
    let sizes = weight.matrix()?;
    quantised(module, parts, schemes, sizes, (&weight, CodeOrder::SignedBytes), &scale)
}

fn quantised(
    module: &str,
    parts: &mut Parts<'_>,
    schemes: &[Scheme],
    [rows, columns]: [usize; 2],
    (weight, order): (&Part<'_>, CodeOrder),
    scale: &Part<'_>,
) -> Result<PackedMatrix, CheckpointError> {
    let bits = if order == CodeOrder::Nibbles { CodeBits::Four } else { CodeBits::Eight };
    // Signed bytes may hold codes of fewer bits.
    let with_bits = |bits| find_scheme(schemes, scale, [rows, columns], false, bits);
    let scheme = match with_bits(bits.count()) {
        Err(error) if order == CodeOrder::SignedBytes => with_bits(4).map_err(|_| error),
        result => result,
    }?;
    if let Sharing::Block(..) = scheme.sharing {
        return Err(scale.unsupported("of strategy block for integers", "tensor, channel, group"));
    }
    let (scales, width) = scheme.sharing.scales(scale, columns)?;
    let groups = column_groups(parts.take(module, "weight_g_idx"), columns, width, true)?;
    let zeros = match parts.take(module, "weight_zero_point") {
        Some(zeros) => zero_points(&zeros, bits, rows, scale)?,
        None if scheme.symmetric => Zeros::Centre,
        None => parts.require(module, "weight_zero_point").map(|_| Zeros::Centre)?,
    };
    drop_activation_scales(module, parts);
    Ok(PackedMatrix {
        rows,
        columns,
        codes: weight.codes(order),
        scales,
        zeros,
        groups,
        activations: scheme.activations,
    })
}

fn zero_points(
    zeros: &Part<'_>,
    bits: CodeBits,
    rows: usize,
    scale: &Part<'_>,
) -> Result<Zeros, CheckpointError> {
    if zeros.is("I8") {
        zeros.expect_shape(&scale.shape, "scales of this shape")?;
        let all_zero = zeros.bytes().iter().all(|&zero| zero == 0);
        return Ok(if all_zero { Zeros::Centre } else { Zeros::SignedBytes(zeros.at.clone()) });
    }
    let per_word = 32 / bits.count() as usize;
    let [words, _] = zeros.words()?;
    let num_groups = if scale.shape.len() == 2 { scale.shape[1] } else { 1 };
    zeros.expect_shape(&[rows.div_ceil(per_word), num_groups], "these scales")?;
    let full = words * per_word == rows;
    if full && all_codes_are(zeros, bits, bits.centre() as u32) {
        return Ok(Zeros::Centre);
    }
    Ok(Zeros::GroupWords(zeros.at.clone()))
}

/// A weight of 8-bit floating-point numbers.
fn floats(module: &str, parts: &mut Parts<'_>, schemes: &[Scheme]) -> Result<PackedMatrix, CheckpointError> {
    let weight = parts.require(module, "weight")?;
    let scale = parts.require(module, "weight_scale")?;
    let scheme = find_scheme(schemes, &scale, weight.matrix()?, true, 8)?;
    if let Some(zeros) = parts.take(module, "weight_zero_point")
        && zeros.bytes().iter().any(|&byte| byte & 0x7f != 0)
    {
        return Err(zeros.unsupported("not zero", "zero"));
    }
    drop_activation_scales(module, parts);
    fp8::matrix(&weight, &scale, scheme.sharing, scheme.activations)
}

/// Removes scales of activations, which the engine computes.
fn drop_activation_scales(module: &str, parts: &mut Parts<'_>) {
    parts.drop(module, &["input_scale", "input_zero_point", "output_scale", "output_zero_point"]);
}
