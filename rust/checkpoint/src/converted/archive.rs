//! Converted models in one uncompressed tar archive.

use std::io::Cursor;

use tar::{Archive, EntryType, Header};

use super::NOT_CONVERTED;
use crate::error::{CheckpointError, TRUNCATED, shown};
use crate::mapped::MappedFile;

/// Files in an archive start at multiples of this size and are padded to it.
pub(super) const BLOCK: usize = 512;

/// Whether a file begins with the header of a tar archive.
pub(super) fn has_magic(bytes: &[u8]) -> bool {
    bytes.get(257..262) == Some(b"ustar")
}

/// The archive members with these names.
pub(super) fn members<const N: usize>(
    file: &MappedFile,
    names: [&str; N],
) -> Result<[MappedFile; N], CheckpointError> {
    let found = find(file, &names)?;
    let mut missing = None;
    let members = std::array::from_fn(|index| {
        found[index].clone().map_or_else(
            || {
                missing = missing.or(Some(names[index]));
                file.part(names[index], 0..0)
            },
            |range| file.part(names[index], range),
        )
    });
    match missing {
        None => Ok(members),
        Some(name) => Err(CheckpointError::not_a_model(
            file.path(),
            format!("{NOT_CONVERTED}: there is no {name} in it"),
        )),
    }
}

/// The range of each member.
fn find(file: &MappedFile, names: &[&str]) -> Result<Vec<Option<std::ops::Range<usize>>>, CheckpointError> {
    let bytes = file.bytes();
    let malformed = |error: std::io::Error| {
        CheckpointError::not_a_model(file.path(), format!("{NOT_CONVERTED}: {}", shown(&error.to_string())))
    };
    let mut ranges = vec![None; names.len()];
    let mut archive = Archive::new(Cursor::new(bytes));
    for entry in archive.entries_with_seek().map_err(malformed)? {
        let entry = entry.map_err(malformed)?;
        let path = entry.path_bytes();
        let path = path.strip_prefix(b"./").unwrap_or(&path);
        let Some(index) = names.iter().position(|name| name.as_bytes() == path) else { continue };
        let (start, size) = (entry.raw_file_position(), entry.size());
        let end = start.checked_add(size).filter(|end| *end <= bytes.len() as u64);
        let problem = match (end, ranges[index].is_some()) {
            (_, true) => "the archive contains this file twice".to_owned(),
            (None, _) => format!("{size} bytes; the archive has {}; {TRUNCATED}", bytes.len()),
            (Some(end), false) if entry.header().entry_type().is_file() => {
                ranges[index] = Some(start as usize..end as usize);
                continue;
            }
            (Some(_), false) => "is not a regular file".to_owned(),
        };
        return Err(CheckpointError::malformed(file.path(), names[index], problem));
    }
    Ok(ranges)
}

/// The header of a file.
pub(super) fn header(name: &str, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_path(name).expect("a short name");
    header.set_entry_type(EntryType::Regular);
    header.set_size(size);
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_cksum();
    header
}

/// The padding after a file.
pub(super) fn padding(size: u64) -> &'static [u8] {
    &[0; BLOCK][..(size.next_multiple_of(BLOCK as u64) - size) as usize]
}
