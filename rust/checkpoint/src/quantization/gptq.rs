//! GPTQ and AWQ: `qweight`, `qzeros` and `scales` for each module. Input features are the slower dimension of all
//! three.

use penstock_types::{Activations, CodeBits};

use super::describe_groups;
use super::parts::{Part, Parts};
use super::scales::{column_groups, scales};
use super::settings::Settings;
use crate::error::CheckpointError;
use crate::packed::{CodeOrder, ColumnGroups, PackedMatrix, Zeros};

const PARTS: [&str; 3] = ["qweight", "qzeros", "scales"];

/// The settings of a GPTQ checkpoint.
struct Gptq {
    bits: CodeBits,
    /// `None` if some modules have other groups than the rest.
    group_size: Option<Option<usize>>,
    /// Whether some modules have other bits than the rest.
    mixed: bool,
    /// Added to the stored zero points.
    plus: u32,
    /// Whether columns are grouped by `g_idx`.
    act_order: bool,
}

pub(super) fn read_gptq(settings: &Settings<'_>, parts: &mut Parts<'_>) -> Result<String, CheckpointError> {
    let plus = match settings.text("checkpoint_format")? {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(other) => return Err(settings.unsupported("checkpoint_format", other, "gptq, gptq_v2")),
    };
    if let Some(other) = settings.text("pack_dtype")?.filter(|dtype| *dtype != "int32") {
        return Err(settings.unsupported("pack_dtype", other, "int32"));
    }
    for field in ["is_marlin_format", "adapter", "rotation"] {
        settings.reject(field)?;
    }
    let mixed = settings.object("dynamic")?.is_some();
    read_modules(settings, parts, plus, mixed, "GPTQ")
}

/// Checkpoints of auto-round, which have the layout of GPTQ or of AWQ.
pub(super) fn read_auto_round(
    settings: &Settings<'_>,
    parts: &mut Parts<'_>,
) -> Result<String, CheckpointError> {
    if let Some(other) = settings.text("data_type")?.filter(|data_type| *data_type != "int") {
        return Err(settings.unsupported("data_type", other, "int"));
    }
    if let Some(bits) = settings.integer("act_bits")?.filter(|bits| *bits < 16) {
        return Err(settings.unsupported("act_bits", &bits.to_string(), "16"));
    }
    let mixed = settings.get("extra_config").is_some();
    let plus = match settings.text("packing_format")?.unwrap_or("auto_round:auto_gptq") {
        "auto_round:auto_gptq" => 1,
        "auto_round" | "auto_round:gptqmodel" => 0,
        "auto_round:auto_awq" | "auto_round:awq" => return read_awq(settings, parts),
        other => {
            let supported = "auto_round, auto_round:auto_gptq, auto_round:gptqmodel, auto_round:auto_awq";
            return Err(settings.unsupported("packing_format", other, supported));
        }
    };
    read_modules(settings, parts, plus, mixed, "auto-round")
}

fn read_modules(
    settings: &Settings<'_>,
    parts: &mut Parts<'_>,
    plus: u32,
    mixed: bool,
    method: &str,
) -> Result<String, CheckpointError> {
    let bits = match settings.integer("bits")? {
        Some(4) => CodeBits::Four,
        Some(8) => CodeBits::Eight,
        Some(other) => return Err(settings.unsupported("bits", &other.to_string(), "4, 8")),
        None => return Err(settings.malformed("bits", "missing; 4 or 8 is expected")),
    };
    let group_size = settings.group_size()?;
    let act_order = settings.bool("desc_act")?.unwrap_or(false);
    let gptq = Gptq { bits, group_size: group_size.filter(|_| !mixed), mixed, plus, act_order };
    for module in parts.modules(&PARTS) {
        let matrix = gptq.matrix(&module, parts)?;
        parts.insert(&module, matrix)?;
    }
    let groups = group_size.map_or_else(String::new, |width| format!(", {}", describe_groups(width)));
    Ok(format!("{method}, {} bits{groups}", bits.count()))
}

impl Gptq {
    fn matrix(&self, module: &str, parts: &mut Parts<'_>) -> Result<PackedMatrix, CheckpointError> {
        let [weight, zeros, scale] = PARTS.map(|part| parts.require(module, part));
        let (weight, zeros, scale) = (weight?, zeros?, scale?);
        let group_index = parts.take(module, "g_idx");

        let [words, rows] = weight.words()?;
        let [num_groups, zero_words] = zeros.words()?;
        let bits = match zero_words * 32 / rows {
            _ if !self.mixed => self.bits,
            4 => CodeBits::Four,
            8 => CodeBits::Eight,
            other => return Err(weight.unsupported(format!("{other} bits"), "4, 8 bits")),
        };
        let per_word = 32 / bits.count() as usize;
        let columns = words * per_word;
        if !rows.is_multiple_of(per_word) {
            return Err(
                weight.malformed(format!("{rows} output features; a multiple of {per_word} is expected"))
            );
        }
        let matrix = format!("a matrix {rows}x{columns} of {} bits", bits.count());
        let width = match self.group_size {
            Some(width) => width.unwrap_or(columns),
            None => columns.div_ceil(num_groups),
        };
        let reason = format!("{matrix} in groups of {width}");
        zeros.expect_shape(&[columns.div_ceil(width), rows / per_word], &reason)?;
        scale.expect_shape(&[num_groups, rows], &reason)?;

        let centre = bits.centre() as u32 - self.plus;
        Ok(PackedMatrix {
            rows,
            columns,
            codes: weight.codes(CodeOrder::ColumnWords(bits)),
            scales: scales(&scale, 1, 1, rows)?,
            groups: column_groups(group_index, columns, width, self.act_order)?,
            zeros: if all_codes_are(&zeros, bits, centre) {
                Zeros::Centre
            } else if bits == CodeBits::Eight && self.plus > 0 && zeros.bytes().contains(&u8::MAX) {
                return Err(zeros.malformed("a zero point is 256; 1 to 255 is expected"));
            } else {
                Zeros::RowWords { at: zeros.at.clone(), plus: self.plus }
            },
            activations: Activations::Float,
        })
    }
}

pub(super) fn read_awq(settings: &Settings<'_>, parts: &mut Parts<'_>) -> Result<String, CheckpointError> {
    match settings.integer("bits")?.or(settings.integer("w_bit")?) {
        None | Some(4) => {}
        Some(other) => return Err(settings.unsupported("bits", &other.to_string(), "4")),
    }
    // Versions with the layout of "gemm"; the others are "gemv", "gemv_fast", "llm-awq" and "marlin".
    let version = settings.text("version")?.map(str::to_ascii_lowercase);
    if let Some(other) = version.filter(|version| !matches!(version.as_str(), "gemm" | "exllama" | "ipex")) {
        return Err(settings.unsupported("version", &other, "gemm"));
    }
    if let Some(other) = settings.text("backend")?.filter(|backend| *backend == "llm-awq") {
        return Err(settings.unsupported("backend", other, "autoawq"));
    }
    let group_size = settings.group_size()?;
    for module in parts.modules(&PARTS) {
        let [weight, zeros, scale] = PARTS.map(|part| parts.require(&module, part));
        let (weight, zeros, scale) = (weight?, zeros?, scale?);
        let [columns, words] = weight.words()?;
        let rows = words * 8;
        let num_groups = zeros.words()?[0];
        let width = match group_size {
            Some(width) => width.unwrap_or(columns),
            None => columns.div_ceil(num_groups),
        };
        let reason = format!("a matrix {rows}x{columns} of 4 bits in groups of {width}");
        zeros.expect_shape(&[columns.div_ceil(width), words], &reason)?;
        scale.expect_shape(&[num_groups, rows], &reason)?;
        let matrix = PackedMatrix {
            rows,
            columns,
            codes: weight.codes(CodeOrder::AwqWords),
            scales: scales(&scale, 1, 1, rows)?,
            groups: ColumnGroups::Width(width),
            zeros: if all_codes_are(&zeros, CodeBits::Four, 8) {
                Zeros::Centre
            } else {
                Zeros::AwqWords(zeros.at.clone())
            },
            activations: Activations::Float,
        };
        parts.insert(&module, matrix)?;
    }
    let groups = group_size.map_or_else(String::new, |width| format!(", {}", describe_groups(width)));
    Ok(format!("AWQ, 4 bits{groups}"))
}

/// Whether all codes of a matrix of full words are `code`.
pub(super) fn all_codes_are(words: &Part<'_>, bits: CodeBits, code: u32) -> bool {
    let byte = match bits {
        CodeBits::Four => code as u8 * 0x11,
        _ => code as u8,
    };
    words.bytes().iter().all(|&found| found == byte)
}
