//! The memory that an engine may take, and sizes in messages.

use penstock_types::FieldError;

use crate::LaunchConfig;
use crate::environment::MEMORY_LEFTOVER;

/// The memory that the engine may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryBudget {
    /// The bytes that the engine may take with a `memory_ratio` of 1.
    pub usable: u64,
    /// The bytes that it may take with the `memory_ratio` in effect.
    pub limit: u64,
}

impl MemoryBudget {
    /// The budget of a configuration on a device with `available` bytes.
    pub fn new(config: &LaunchConfig, available: u64) -> Result<Self, FieldError> {
        let leftover = config.memory_leftover_bytes;
        if leftover >= available {
            // The field has no other name for users.
            let limit = format!("less than the {} MiB that are available", available >> 20);
            return Err(FieldError::new(MEMORY_LEFTOVER, leftover >> 20, limit));
        }
        let usable = available - leftover;
        Ok(Self { usable, limit: share(usable, config.options.memory_ratio()) })
    }
}

/// A share of `bytes`, not more than `bytes` after rounding.
pub(crate) fn share(bytes: u64, ratio: f64) -> u64 {
    ((bytes as f64 * ratio) as u64).min(bytes)
}

/// A size for messages, such as "513 MiB" or "1.5 GiB".
pub(crate) fn display_bytes(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    let size = bytes as f64;
    if size < KIB {
        format!("{bytes} bytes")
    } else if size < KIB * KIB {
        format!("{:.0} KiB", size / KIB)
    } else if size < KIB * KIB * KIB {
        format!("{:.0} MiB", size / (KIB * KIB))
    } else {
        format!("{:.1} GiB", size / (KIB * KIB * KIB))
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::EngineConfig;

    use super::*;

    #[test]
    fn limit_is_a_share_of_the_available_memory() {
        let budget = |memory_ratio, leftover, available| {
            let options = EngineConfig { memory_ratio, ..EngineConfig::default() };
            let config = LaunchConfig { memory_leftover_bytes: leftover, ..options.into() };
            MemoryBudget::new(&config, available)
        };
        assert_eq!(budget(Some(0.5), 200, 1000), Ok(MemoryBudget { usable: 800, limit: 400 }));
        assert_eq!(budget(None, 0, 1000).expect("a limit").limit, 900);
        assert_eq!(budget(Some(1.0), 1, u64::MAX).expect("a limit").limit, u64::MAX - 1);
        assert_eq!(
            budget(None, 5 << 20, 5 << 20).expect_err("nothing is left").to_string(),
            "BFC_LEFTOVER_MB=5 is not allowed: it must be less than the 5 MiB that are available"
        );
    }

    #[test]
    fn sizes_in_messages_have_a_unit() {
        let sizes = [999, 1536, 513 << 20, 1 << 30, (20 << 30) + (1 << 29)];
        let texts = ["999 bytes", "2 KiB", "513 MiB", "1.0 GiB", "20.5 GiB"];
        assert_eq!(sizes.map(display_bytes), texts);
    }
}
