//! [`Device`]: the device that an engine computes on.

use std::fmt::{self, Display, Formatter};

/// The largest index of a CUDA device that has a name.
const MAX_INDEX: u32 = 999;

/// A device by its name in the Python API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// Left to the engine.
    #[default]
    Auto,
    /// The processors of the host.
    Cpu,
    /// The visible CUDA device of this index.
    Cuda(u32),
}

impl Device {
    /// The device of a name: `auto`, `cpu`, `cuda` or `cuda:1`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(0)),
            _ => {
                let index = name.strip_prefix("cuda:")?;
                let is_number = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
                let index = index.parse().ok().filter(|index| is_number && *index <= MAX_INDEX)?;
                Some(Self::Cuda(index))
            }
        }
    }
}

impl Display for Device {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for device in [Device::Auto, Device::Cpu, Device::Cuda(0), Device::Cuda(999)] {
            assert_eq!(Device::from_name(&device.to_string()), Some(device));
        }
        assert_eq!(Device::from_name("cuda"), Some(Device::Cuda(0)));
    }

    #[test]
    fn other_names_are_refused() {
        for name in ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:+1", "cuda:1000", "cuda:1:2", "cuda: 1"] {
            assert_eq!(Device::from_name(name), None, "{name}");
        }
    }
}
