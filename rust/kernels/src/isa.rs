//! The instruction set of the kernels: detected here, or named by the caller (`PENSTOCK_ISA`).

use std::{error, fmt};

/// An instruction set with a kernel table, from the least to the most capable.
///
/// To add one (AVX-512/VNNI, AMX, NEON): a variant here, a `Simd` implementation in `arch/`, and a line in
/// [`Isa::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust for any target; the compiler vectorises it for the target's baseline.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
}

impl Isa {
    /// Every instruction set, in ascending order.
    pub const ALL: &[Isa] = &[Isa::Portable, Isa::Avx2];

    /// The value of `PENSTOCK_ISA` that selects it.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
        }
    }

    /// Whether this CPU (and operating system) can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 => false,
        }
    }

    /// The instruction sets this CPU can run, in ascending order.
    pub fn available() -> impl DoubleEndedIterator<Item = Isa> {
        Isa::ALL.iter().copied().filter(|isa| isa.is_available())
    }

    /// The most capable instruction set of this CPU.
    pub fn best() -> Isa {
        Isa::available().next_back().unwrap_or(Isa::Portable)
    }

    /// The instruction set of this name; an empty one means [`Isa::best`].
    pub fn from_name(value: &str) -> Result<Isa, IsaError> {
        if value.is_empty() {
            return Ok(Isa::best());
        }
        match Isa::ALL.iter().find(|isa| isa.name() == value) {
            None => Err(IsaError::Unknown { value: value.to_owned() }),
            Some(isa) if isa.is_available() => Ok(*isa),
            Some(isa) => Err(IsaError::Unavailable { isa: *isa }),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `PENSTOCK_ISA` names an instruction set that cannot be used here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsaError {
    /// No kernel table has this name.
    Unknown { value: String },
    /// This CPU cannot run the named instruction set.
    Unavailable { isa: Isa },
}

impl IsaError {
    /// The value of `PENSTOCK_ISA`.
    pub fn value(&self) -> &str {
        match self {
            IsaError::Unknown { value } => value,
            IsaError::Unavailable { isa } => isa.name(),
        }
    }

    /// The allowed values on this CPU.
    pub fn limit(&self) -> String {
        let names: Vec<&str> = Isa::available().map(Isa::name).collect();
        format!("an instruction set of this CPU: {}", names.join(" or "))
    }
}

impl fmt::Display for IsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IsaError::Unknown { value } => write!(f, "PENSTOCK_ISA={value} is not an instruction set")?,
            IsaError::Unavailable { isa } => write!(f, "PENSTOCK_ISA={isa} is not available on this CPU")?,
        }
        write!(f, "; it must be {}", self.limit())
    }
}

impl error::Error for IsaError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portable_and_best_are_available() {
        assert!(Isa::Portable.is_available());
        assert!(Isa::best().is_available());
        assert!(Isa::best() >= Isa::Portable);
    }

    #[test]
    fn empty_name_selects_the_best() {
        assert_eq!(Isa::from_name(""), Ok(Isa::best()));
    }

    #[test]
    fn name_selects_its_instruction_set() {
        for isa in Isa::available() {
            assert_eq!(Isa::from_name(isa.name()), Ok(isa));
        }
    }

    #[test]
    fn unknown_name_error_lists_the_available_ones() {
        let error = Isa::from_name("sse9").expect_err("no such name");
        assert_eq!(error, IsaError::Unknown { value: "sse9".into() });
        let text = error.to_string();
        assert!(text.contains("sse9") && text.contains("portable"), "{text}");
    }

    #[test]
    fn unavailable_instruction_set_error_lists_the_available_ones() {
        let text = IsaError::Unavailable { isa: Isa::Avx2 }.to_string();
        assert!(text.contains("PENSTOCK_ISA=avx2") && text.contains("this CPU: portable"), "{text}");
    }
}
