//! Enums whose variants have names in the Python API.

/// An enum whose variants have names in the Python API.
pub trait Named: Copy + PartialEq + 'static {
    /// Every variant.
    const ALL: &'static [Self];

    /// The name in the Python API.
    fn name(self) -> &'static str;

    /// The variant with this name.
    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|variant| variant.name() == name)
    }
}
