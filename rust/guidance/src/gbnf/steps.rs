//! A limit on the work of a translation.

use super::TranslationError;

/// Maximum work: operations on words of bit sets, and copies and comparisons of characters. It takes less than half a
/// second.
const MAX_STEPS: usize = 40_000_000;

/// The work that is left.
pub(super) struct Steps(usize);

impl Steps {
    pub(super) fn new() -> Self {
        Self(MAX_STEPS)
    }

    #[cfg(test)]
    pub(super) fn with(count: usize) -> Self {
        Self(count)
    }

    /// Called before the work.
    pub(super) fn take(&mut self, count: usize) -> Result<(), TranslationError> {
        self.0 = self.0.checked_sub(count).ok_or_else(|| {
            TranslationError::TooComplex(format!("its translation takes more than {MAX_STEPS} steps"))
        })?;
        Ok(())
    }
}
