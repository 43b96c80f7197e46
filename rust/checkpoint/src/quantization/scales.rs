//! The scales of a matrix: one for the tensor, each row, each group of columns, or each block; and the columns of
//! groups.

use crate::error::CheckpointError;
use crate::packed::{ColumnGroups, Scales};
use crate::storage::Storage;
use crate::tensor::StoredType;

use super::parts::Part;

/// The weights that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    Tensor,
    Row,
    Group(usize),
    Block(usize, usize),
}

impl Sharing {
    /// Whether scales of this shape fit a matrix.
    pub(super) fn fits(self, shape: &[usize], rows: usize, columns: usize) -> bool {
        match self {
            Sharing::Tensor => shape.iter().all(|&size| size == 1),
            Sharing::Row => shape == [rows] || shape == [rows, 1],
            Sharing::Group(width) => shape == [rows, columns.div_ceil(width)],
            Sharing::Block(height, width) => shape == [rows.div_ceil(height), columns.div_ceil(width)],
        }
    }

    /// The scales in `part`, which fit, with the width of a group.
    pub(super) fn scales(self, part: &Part<'_>, columns: usize) -> Result<(Scales, usize), CheckpointError> {
        let (rows, row_stride, group_stride, width) = match self {
            Sharing::Tensor => (1, 0, 0, columns),
            Sharing::Row => (1, 1, 0, columns),
            Sharing::Group(width) => (1, columns.div_ceil(width), 1, width),
            Sharing::Block(height, width) => (height, columns.div_ceil(width), 1, width),
        };
        Ok((scales(part, rows, row_stride, group_stride)?, width))
    }
}

/// The scales in `part`, which has one for every index.
pub(super) fn scales(
    part: &Part<'_>,
    rows: usize,
    row_stride: usize,
    group_stride: usize,
) -> Result<Scales, CheckpointError> {
    let dtype = match part.stored {
        StoredType::Weights(storage @ (Storage::F32 | Storage::F16 | Storage::Bf16)) => storage.dtype(),
        _ => return Err(part.unsupported(part.stored.to_string(), "F32, F16, BF16")),
    };
    Ok(Scales { at: part.at.clone(), dtype, rows, row_stride, group_stride })
}

/// The groups of the columns. `index` has the group of each column; without reordering by activation, groups are
/// consecutive columns.
pub(super) fn column_groups(
    index: Option<Part<'_>>,
    columns: usize,
    width: usize,
    act_order: bool,
) -> Result<ColumnGroups, CheckpointError> {
    let consecutive = ColumnGroups::Width(width);
    let Some(index) = index.filter(|index| !index.shape.contains(&0)) else { return Ok(consecutive) };
    index.expect_shape(&[columns], &format!("{columns} input features"))?;
    let groups = index.integers()?;
    let in_order = groups.iter().enumerate().all(|(column, group)| *group == (column / width) as i64);
    // Some tools do not write the index if they do not reorder: it is -1, or zero.
    let unset =
        groups.iter().all(|group| *group == -1) || !act_order && groups.iter().all(|group| *group == 0);
    if in_order || unset {
        return Ok(consecutive);
    }
    let limit = columns.div_ceil(width);
    let groups = groups.into_iter().map(|group| {
        let in_range = u32::try_from(group).ok().filter(|&group| (group as usize) < limit);
        in_range.ok_or_else(|| index.malformed(format!("group {group}; the limit is {}", limit - 1)))
    });
    Ok(ColumnGroups::Indices(groups.collect::<Result<_, _>>()?))
}
