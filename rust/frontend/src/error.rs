//! The errors of a request before it runs.

use penstock_engine::StartError;
use penstock_text::TextError;

/// A request cannot be started, or ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text options are not valid.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The engine did not accept the request.
    #[error(transparent)]
    Start(#[from] StartError),
}
