//! The device backend of this build. Everything else in this crate is generic over `Backend`.

use penstock_device::cpu::{Cpu, CpuError};
use penstock_types::FieldError;

use crate::{EngineConfig, LaunchError};

/// The backend of this build.
pub type DefaultBackend = Cpu;

/// The properties of a device that [`ModelInfo`](crate::ModelInfo) reports.
#[derive(Clone, Copy, Debug)]
pub struct DeviceInfo {
    pub threads: usize,
    /// Instruction set of the kernels, as in `PENSTOCK_ISA`.
    pub isa: &'static str,
}

/// Opens the device of a valid configuration.
pub(crate) fn open(config: &EngineConfig) -> Result<(DefaultBackend, DeviceInfo), LaunchError> {
    let backend = Cpu::with_isa(config.threads(), config.isa.as_deref().unwrap_or_default())?;
    let info = DeviceInfo { threads: backend.threads(), isa: backend.isa() };
    Ok((backend, info))
}

impl From<CpuError> for LaunchError {
    fn from(error: CpuError) -> Self {
        match error {
            CpuError::Isa(error) => {
                Self::Config(FieldError::new("PENSTOCK_ISA", error.value(), error.limit()))
            }
            CpuError::Device(error) => error.into(),
        }
    }
}
