//! Values of GGUF metadata.

/// One value. Arrays are kept as bytes of the file until they are read.
pub(super) enum MetadataValue<'a> {
    Integer(i128),
    Single(f32),
    Double(f64),
    Bool(bool),
    Text(&'a str),
    Array { value_type: u32, count: usize, bytes: &'a [u8] },
}

impl<'a> MetadataValue<'a> {
    /// Decodes a scalar from exactly its bytes. `None` for an invalid boolean.
    pub(super) fn scalar(value_type: u32, bytes: &[u8]) -> Option<MetadataValue<'a>> {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        let signed = |bits: u32| {
            MetadataValue::Integer(i128::from((unsigned << (64 - bits)).cast_signed() >> (64 - bits)))
        };
        Some(match value_type {
            0 | 2 | 4 | 10 => MetadataValue::Integer(i128::from(unsigned)),
            1 => signed(8),
            3 => signed(16),
            5 => signed(32),
            11 => signed(64),
            6 => MetadataValue::Single(f32::from_bits(unsigned as u32)),
            12 => MetadataValue::Double(f64::from_bits(unsigned)),
            7 if unsigned <= 1 => MetadataValue::Bool(unsigned == 1),
            _ => return None,
        })
    }
}

/// Size in bytes of a scalar value type.
pub(super) fn scalar_bytes(value_type: u32) -> Option<u64> {
    match value_type {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// The double with the fewest digits that rounds to this single: 1e-5, as in the model's own configuration, instead of
/// 9.999999747378752e-6.
pub(super) fn shortest(single: f32) -> f64 {
    single.to_string().parse().unwrap_or_else(|_| f64::from(single))
}
