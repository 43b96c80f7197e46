//! The values that a caller passes for fields: Python objects, JSON.

use std::path::PathBuf;

/// A value that a caller passes for a field.
///
/// Values are untrusted: an iterator may be endless, a text may fill the memory. So readers ask for the length first,
/// copy nothing that is larger than allowed and read nothing beyond the limit, not even for an error message.
pub trait Value: Clone {
    /// An exception that the caller's code raised while the value was read.
    type Raised;

    /// The JSON type of the value, from its type alone: a value that only converts to a number (`__index__`) is
    /// [`Kind::Other`]. Looking for a mapping may run code of the caller (`__class__`); if that raises an exception,
    /// the value is not a mapping.
    fn kind(&self) -> Kind;
    /// An integer; `None` for another type (`bool` is one) or beyond 128 bits.
    fn integer(&self) -> Result<Option<i128>, Self::Raised>;
    /// A number; `None` for another type (`bool` is one).
    fn number(&self) -> Result<Option<f64>, Self::Raised>;
    /// The number of characters of a string.
    fn text_len(&self) -> Result<usize, Self::Raised>;
    /// A string; `None` if it is not valid Unicode.
    fn text(&self) -> Result<Option<String>, Self::Raised>;
    /// A path: a string, or an object that stands for a path; `None` for another type.
    fn path(&self) -> Result<Option<PathBuf>, Self::Raised> {
        if self.kind() == Kind::Text { Ok(self.text()?.map(PathBuf::from)) } else { Ok(None) }
    }
    /// The items of any iterable except strings, bytes and mappings; `None` for those and for other types.
    fn items(&self) -> Result<Option<impl Iterator<Item = Result<Self, Self::Raised>>>, Self::Raised>;
    /// The items of a [`Kind::Array`], without the iterator of a subclass.
    fn array(&self) -> impl Iterator<Item = Self>;
    /// The number of entries of a [`Kind::Map`].
    fn map_len(&self) -> Result<usize, Self::Raised>;
    /// The entries of a [`Kind::Map`], at most `map_len` of them.
    fn entries(&self) -> Result<Vec<(Self, Self)>, Self::Raised>;
    /// An entry of a [`Kind::Map`].
    fn get(&self, key: &str) -> Result<Option<Self>, Self::Raised>;
    /// The value for an error message, shortened; a large value is not written out.
    fn quote(&self) -> String;
}

/// The JSON type of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Null,
    Bool(bool),
    /// A signed integer of 128 bits; larger ones are `Other`.
    Integer(i128),
    Float(f64),
    Text,
    Array,
    Map,
    /// Not JSON.
    Other,
}
