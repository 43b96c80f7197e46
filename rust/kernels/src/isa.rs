//! The instruction set of the kernels: detected here, or named by the caller (`PENSTOCK_ISA`).

use std::{error, fmt};

/// An instruction set with a kernel table: a name for a set of CPU features.
///
/// The sets are not a ladder: a CPU can have the features of one set and lack those of a set before it. To add one
/// (AVX-VNNI, AVX-512 BF16, AMX, NEON): a variant here with its features, its entry in [`Isa::ALL`], and its table in
/// `arch/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust for any target; the compiler vectorises it for the target's baseline.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The features of `Avx2` and AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The features of `Avx512` and VNNI: integer dot products in one instruction.
    Avx512Vnni,
    /// The features of `Avx512Vnni` and BF16. Products with bf16 matrices round the activations to bf16 and multiply
    /// pairs of them in one instruction: twice the speed, other results. [`Isa::best`] does not select it.
    Avx512Bf16,
}

/// Whether this CPU and operating system have every feature.
#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($($feature:tt),+) => { $(std::arch::is_x86_feature_detected!($feature))&&+ };
}
#[cfg(not(target_arch = "x86_64"))]
macro_rules! has {
    ($($feature:tt),+) => {
        false
    };
}

impl Isa {
    /// Every instruction set, in ascending order of preference.
    pub const ALL: &[Isa] = &[Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16];

    /// The value of `PENSTOCK_ISA` that selects it.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512_vnni",
            Isa::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// Whether this CPU (and operating system) can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            Isa::Avx2 => has!("avx2", "fma", "f16c"),
            Isa::Avx512 => Isa::Avx2.is_available() && has!("avx512f", "avx512bw", "avx512dq", "avx512vl"),
            Isa::Avx512Vnni => Isa::Avx512.is_available() && has!("avx512vnni"),
            Isa::Avx512Bf16 => Isa::Avx512Vnni.is_available() && has!("avx512bf16"),
        }
    }

    /// The instruction sets this CPU can run, in ascending order of preference.
    pub fn available() -> impl DoubleEndedIterator<Item = Isa> {
        Isa::ALL.iter().copied().filter(|isa| isa.is_available())
    }

    /// The preferred instruction set of this CPU, of those that do not round activations.
    pub fn best() -> Isa {
        Isa::available().rfind(|isa| *isa != Isa::Avx512Bf16).unwrap_or(Isa::Portable)
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
        assert_eq!(Isa::available().next(), Some(Isa::Portable));
        assert_eq!(Isa::available().rfind(|isa| *isa != Isa::Avx512Bf16), Some(Isa::best()));
    }

    #[test]
    fn empty_name_selects_the_best() {
        assert_eq!(Isa::from_name(""), Ok(Isa::best()));
    }

    #[test]
    fn name_selects_its_instruction_set() {
        for isa in Isa::ALL.iter().copied() {
            let want = if isa.is_available() { Ok(isa) } else { Err(IsaError::Unavailable { isa }) };
            assert_eq!(Isa::from_name(isa.name()), want);
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
