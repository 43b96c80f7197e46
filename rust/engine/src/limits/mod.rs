//! The fixed limits of an engine, and the check of a request against them.

#[expect(clippy::module_inception, reason = "the type has the name of its module")]
mod limits;
mod request_check;
#[cfg(test)]
mod test_support;

pub use limits::Limits;
pub use request_check::InvalidRequest;
