//! 8-bit floating-point weights (E4M3) with `weight_scale` or `weight_scale_inv`, which are both factors.

use penstock_types::Activations;

use super::parts::{Part, Parts};
use super::scales::Sharing;
use super::settings::Settings;
use crate::error::CheckpointError;
use crate::packed::{CodeOrder, ColumnGroups, PackedMatrix, Zeros};

pub(super) const DTYPE: &str = "F8_E4M3";

pub(super) fn read(settings: &Settings<'_>, parts: &mut Parts<'_>) -> Result<String, CheckpointError> {
    if let Some(other) = settings.text("fmt")?.filter(|fmt| !matches!(*fmt, "e4m3" | "float8_e4m3fn")) {
        return Err(settings.unsupported("fmt", other, "e4m3"));
    }
    if let Some(other) = settings.text("quant_algo")?.filter(|algorithm| *algorithm != "FP8") {
        return Err(settings.unsupported("quant_algo", other, "FP8"));
    }
    let block = settings.block("weight_block_size")?;
    for module in parts.modules_of(DTYPE) {
        let weight = parts.require(&module, "weight")?;
        let scale = match parts.take(&module, "weight_scale_inv") {
            Some(scale) => scale,
            None => parts.require(&module, "weight_scale")?,
        };
        parts.drop(&module, &["input_scale", "activation_scale", "input_scale_ub"]);
        let [rows, columns] = weight.matrix()?;
        let sharings = [Sharing::Tensor, Sharing::Row];
        let sharings = block.map(|(rows, columns)| Sharing::Block(rows, columns)).into_iter().chain(sharings);
        let Some(sharing) = sharings.into_iter().find(|sharing| sharing.fits(&scale.shape, rows, columns))
        else {
            let block =
                block.map_or_else(String::new, |(rows, columns)| format!(", or of {rows}x{columns} blocks"));
            let problem = format!(
                "shape {:?}; scales of the tensor or the rows of a matrix {rows}x{columns}{block} are expected",
                scale.shape
            );
            return Err(scale.malformed(problem));
        };
        parts.insert(&module, matrix(&weight, &scale, sharing, Activations::Fp8)?)?;
    }
    Ok(block.map_or_else(|| "FP8".to_owned(), |(rows, columns)| format!("FP8, blocks of {rows}x{columns}")))
}

/// The matrix of a weight with scales that fit it.
pub(super) fn matrix(
    weight: &Part<'_>,
    scale: &Part<'_>,
    sharing: Sharing,
    activations: Activations,
) -> Result<PackedMatrix, CheckpointError> {
    let [rows, columns] = weight.matrix()?;
    let (scales, width) = sharing.scales(scale, columns)?;
    Ok(PackedMatrix {
        rows,
        columns,
        codes: weight.codes(CodeOrder::Float8),
        scales,
        zeros: Zeros::Centre,
        groups: ColumnGroups::Width(width),
        activations,
    })
}
