//! The instruction set of the kernels: detected here, or named by the caller (`PENSTOCK_ISA`).

use std::{error, fmt};

/// An instruction set with a kernel table: a name for a set of CPU features.
///
/// The sets are not totally ordered: a CPU can have the features of a set and lack those of an earlier set. A new set
/// needs a variant here with its features, an entry in [`Isa::ALL`], and a table in `arch/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust for any target; the compiler vectorises it for the target's baseline.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The features of `Avx2` and AVX-VNNI: integer dot products in one instruction.
    AvxVnni,
    /// The features of `Avx2` and AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The features of `Avx512` and VNNI: integer dot products in one instruction.
    Avx512Vnni,
    /// The features of `Avx512Vnni` and BF16. Products with bf16 matrices round the activations to bf16 and multiply
    /// pairs of them in one instruction: twice the speed, other results. [`Isa::best`] does not select it.
    Avx512Bf16,
    /// The features of `Avx512Vnni` and AMX-INT8: products of tiles of integers. [`Isa::best`] does not select it.
    Amx,
    /// 64-bit Arm with NEON.
    Neon,
    /// The features of `Neon` and DOTPROD: integer dot products in one instruction.
    NeonDotprod,
    /// The features of `NeonDotprod` and I8MM: dot products of unsigned by signed integers.
    NeonI8mm,
}

/// Whether the target is x86-64 and the CPU and the operating system support every feature.
#[cfg(target_arch = "x86_64")]
macro_rules! has_x86 {
    ($($feature:tt),+) => { $(std::arch::is_x86_feature_detected!($feature))&&+ };
}
#[cfg(not(target_arch = "x86_64"))]
macro_rules! has_x86 {
    ($($feature:tt),+) => {
        false
    };
}

/// Whether the target is 64-bit Arm and the CPU and the operating system support every feature.
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
macro_rules! has_arm {
    ($($feature:tt),+) => { $(std::arch::is_aarch64_feature_detected!($feature))&&+ };
}
#[cfg(not(all(target_arch = "aarch64", target_endian = "little")))]
macro_rules! has_arm {
    ($($feature:tt),+) => {
        false
    };
}

/// Whether this CPU has AMX-INT8 and the operating system lets this process use it. On Linux the process requests it.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    use std::sync::OnceLock;

    const TILE_AND_INT8: u32 = 0b11 << 24;
    const TILE_STATE: u64 = 0b11 << 17;
    const ARCH_PRCTL: u64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const TILE_DATA: u64 = 18;

    #[target_feature(enable = "xsave")]
    fn enabled_states() -> u64 {
        // SAFETY: register 0 exists.
        unsafe { _xgetbv(0) }
    }

    static HAS_AMX: OnceLock<bool> = OnceLock::new();
    *HAS_AMX.get_or_init(|| {
        // SAFETY: every x86-64 CPU has the instruction. Newer versions of Rust do not require the block.
        #[allow(unused_unsafe)]
        let has_int8 =
            unsafe { __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8 };
        if !has_int8 || !has_x86!("xsave") {
            return false;
        }
        // SAFETY: the CPU has the feature.
        if unsafe { enabled_states() } & TILE_STATE != TILE_STATE {
            return false;
        }
        let mut result = ARCH_PRCTL;
        // SAFETY: the call reads and writes no memory of the process.
        unsafe {
            std::arch::asm!(
                "syscall",
                inout("rax") result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_DATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        result == 0
    })
}
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn has_amx() -> bool {
    false
}

impl Isa {
    /// Every instruction set, in ascending order of preference.
    pub const ALL: &[Isa] = &[
        Isa::Portable,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
        Isa::Avx512Vnni,
        Isa::Avx512Bf16,
        Isa::Amx,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::NeonI8mm,
    ];

    /// The value of `PENSTOCK_ISA` that selects it.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx_vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512_vnni",
            Isa::Avx512Bf16 => "avx512_bf16",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon_dotprod",
            Isa::NeonI8mm => "neon_i8mm",
        }
    }

    /// Whether this CPU (and operating system) can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            Isa::Avx2 => has_x86!("avx2", "fma", "f16c"),
            Isa::AvxVnni => Isa::Avx2.is_available() && has_x86!("avxvnni"),
            Isa::Avx512 => {
                Isa::Avx2.is_available() && has_x86!("avx512f", "avx512bw", "avx512dq", "avx512vl")
            }
            Isa::Avx512Vnni => Isa::Avx512.is_available() && has_x86!("avx512vnni"),
            Isa::Avx512Bf16 => Isa::Avx512Vnni.is_available() && has_x86!("avx512bf16"),
            Isa::Amx => Isa::Avx512Vnni.is_available() && has_amx(),
            Isa::Neon => has_arm!("neon"),
            Isa::NeonDotprod => Isa::Neon.is_available() && has_arm!("dotprod"),
            Isa::NeonI8mm => Isa::NeonDotprod.is_available() && has_arm!("i8mm"),
        }
    }

    /// The instruction sets this CPU can run, in ascending order of preference.
    pub fn available() -> impl DoubleEndedIterator<Item = Isa> {
        Isa::ALL.iter().copied().filter(|isa| isa.is_available())
    }

    /// The instruction sets that are selected only by name: `Avx512Bf16` rounds activations, and `Amx` has been tested
    /// only with emulated instructions.
    const BY_NAME: [Isa; 2] = [Isa::Avx512Bf16, Isa::Amx];

    /// The preferred instruction set of this CPU, without those in `BY_NAME`.
    pub fn best() -> Isa {
        // The name is compared first, because the check for AMX changes the state of the process.
        let mut all = Isa::ALL.iter().rev();
        *all.find(|isa| !Isa::BY_NAME.contains(isa) && isa.is_available()).unwrap_or(&Isa::Portable)
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
        assert_eq!(Isa::available().rfind(|isa| !Isa::BY_NAME.contains(isa)), Some(Isa::best()));
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
