//! Enums whose variants have names in the Python API.

/// An enum whose variants have names in the Python API.
pub trait Named: Copy + PartialEq + 'static {
    /// Every variant.
    fn all() -> impl Iterator<Item = Self>;

    /// The name in the Python API.
    fn name(self) -> &'static str;

    /// Other names that are accepted, such as those of other engines.
    fn aliases(self) -> &'static [&'static str] {
        &[]
    }

    /// The variant with this name or alias.
    fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|variant| variant.name() == name || variant.aliases().contains(&name))
    }
}

/// A choice that can be left to the engine, with the name `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Auto<T>(pub Option<T>);

impl<T: Named> Named for Auto<T> {
    fn all() -> impl Iterator<Item = Self> {
        [Self(None)].into_iter().chain(T::all().map(|choice| Self(Some(choice))))
    }

    fn name(self) -> &'static str {
        self.0.map_or("auto", T::name)
    }

    fn aliases(self) -> &'static [&'static str] {
        self.0.map_or(&[], T::aliases)
    }
}
