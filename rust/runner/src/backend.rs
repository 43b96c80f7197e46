//! The choice of the backend. Everything else in this crate is generic over `Backend`.

use std::fmt::Display;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Once};

use penstock_cuda::{CallerThread, Cublas};
use penstock_device::DeviceError;
use penstock_device::cpu::{Cpu, CpuError, CpuHost, NumaNode, numa_nodes, usable_cpus};
pub(crate) use penstock_device::cpu::{Turn, Turns};
use penstock_device::cuda::Cuda;
use penstock_types::config_limits::MAX_THREADS;
use penstock_types::{Device, FieldError};

use crate::cuda::UsableDevice;
use crate::environment::CUBLAS;
use crate::{CudaSettings, CudaUnavailable, LaunchConfig, LaunchError, NumaInfo};

/// The devices of the PCI bus, a folder for each, with the files `vendor` and `class`.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";
const NVIDIA: &str = "0x10de";
/// The class of display controllers, the first byte of a PCI class of three. GPUs without outputs have it, too.
const DISPLAY_CONTROLLER: &str = "0x03";

/// The backend of the CPU, which also converts models.
pub type DefaultBackend = Cpu;
/// The threads and the memory that instances of the CPU backend share.
pub(crate) type DefaultHost = CpuHost;

/// An open device beside its backend: the properties that [`ModelInfo`](crate::ModelInfo) reports, and its turns.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    pub device: Device,
    /// The number of compute threads of the host.
    pub threads: usize,
    /// Instruction set of the kernels, as in `PENSTOCK_ISA`, or the architecture of CUDA kernels.
    pub isa: String,
    /// `None` if threads and memory are anywhere.
    pub numa: Option<NumaInfo>,
    /// The turns of the engines that share its threads; `None` if the device divides itself between engines.
    pub turns: Option<Turns>,
}

/// The device that computes, or the reason why it cannot be used; see `find_device`.
pub fn resolve_device(device: Device, settings: &CudaSettings) -> Result<Device, LaunchError> {
    Ok(find_device(device, settings)?.map_or(Device::Cpu, |found| Device::Cuda(found.device.index)))
}

/// The CUDA device that computes; `None` for the CPU. `auto` is the first CUDA device, or the CPU if that cannot be
/// used. It is logged once: as a warning if the driver has a device, for debugging only if the machine has none.
pub(crate) fn find_device(
    device: Device,
    settings: &CudaSettings,
) -> Result<Option<UsableDevice>, LaunchError> {
    static SAID: Once = Once::new();
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(index) => settings.find(index).map(Some).map_err(|reason| match reason {
            CudaUnavailable::Setting(error) => error.into(),
            reason => unusable(index, &reason),
        }),
        Device::Auto => {
            let found = settings.find(0);
            if let Err(CudaUnavailable::Setting(error)) = found {
                return Err(error.into());
            }
            SAID.call_once(|| match &found {
                Ok(found) => log::info!("device='auto' is cuda:0, {}", found.device.name),
                Err(reason) => {
                    let level = if !reason.is_absent() {
                        log::Level::Warn
                    } else if has_nvidia_gpu(Path::new(PCI_DEVICES)) {
                        log::Level::Info
                    } else {
                        log::Level::Debug
                    };
                    log::log!(level, "device='auto' is the CPU: {reason}");
                }
            });
            Ok(found.ok())
        }
    }
}

/// Whether a folder like [`PCI_DEVICES`] has an NVIDIA GPU, which may lack its driver.
fn has_nvidia_gpu(pci_devices: &Path) -> bool {
    let Ok(devices) = fs::read_dir(pci_devices) else { return false };
    let starts_with = |path: &Path, number: &str| {
        fs::read_to_string(path).is_ok_and(|text| text.trim_start().starts_with(number))
    };
    devices.flatten().map(|device| device.path()).any(|device| {
        starts_with(&device.join("vendor"), NVIDIA) && starts_with(&device.join("class"), DISPLAY_CONTROLLER)
    })
}

/// The error of a CUDA device that cannot be used.
fn unusable(index: u32, reason: &dyn Display) -> LaunchError {
    LaunchError::DeviceUnavailable(format!("device='cuda:{index}' cannot be used: {reason}"))
}

/// Restores the CUDA context of the calling thread when it is dropped.
pub(crate) fn enter_thread(found: &UsableDevice) -> Result<CallerThread, LaunchError> {
    CallerThread::enter(&found.driver).map_err(|reason| unusable(found.device.index, &reason))
}

/// Opens a CUDA device for a valid configuration, and makes it current in the calling thread.
pub(crate) fn open_cuda(
    found: UsableDevice,
    config: &LaunchConfig,
    host: &Arc<DefaultHost>,
) -> Result<(Cuda, DeviceInfo), LaunchError> {
    let index = found.device.index;
    if let Some(nodes) = &config.options.numa_nodes {
        let limit = format!("None with device='cuda:{index}'");
        return Err(FieldError::new("numa_nodes", format!("{nodes:?}"), limit).into());
    }
    let threads = config.options.threads.unwrap_or_else(|| default_threads(usable_cpus(), &[]));
    let cublas = if config.options.deterministic { None } else { find_cublas(config, &found)? };
    let opened = Cuda::open(&found.driver, &found.device, found.compiler, host, threads, cublas);
    let backend = opened.map_err(|error| match error {
        DeviceError::Start(reason) | DeviceError::Lost(reason) => unusable(index, &reason),
        error => error.into(),
    })?;
    let isa = found.device.architecture.to_string();
    let info = DeviceInfo { device: Device::Cuda(index), threads, isa, numa: None, turns: None };
    Ok((backend, info))
}

/// cuBLASLt for a device, or a warning that it is not available; an error if the environment names another library.
fn find_cublas(config: &LaunchConfig, found: &UsableDevice) -> Result<Option<Cublas>, FieldError> {
    let error = match config.cuda.cublas(Some(&found.driver)) {
        Ok(cublas) => return Ok(Some(cublas)),
        Err(error) => error,
    };
    if let Some(path) = &config.cuda.cublas {
        return Err(FieldError::new(CUBLAS, path.display(), format!("the path of cuBLASLt: {error}")));
    }
    log::warn!("deterministic=False changes nothing: {error}");
    Ok(None)
}

/// Opens the CPU for a valid configuration.
pub(crate) fn open_cpu(
    config: &LaunchConfig,
    host: &Arc<DefaultHost>,
) -> Result<(DefaultBackend, DeviceInfo), LaunchError> {
    let nodes = config.options.numa_nodes.as_deref().map_or(Ok(Vec::new()), |ids| {
        numa_nodes(ids).map_err(|error| FieldError::new("numa_nodes", format!("{ids:?}"), error.to_string()))
    })?;
    let threads = config.options.threads.unwrap_or_else(|| default_threads(usable_cpus(), &nodes));
    let backend = Cpu::open(host, threads, config.isa.as_deref().unwrap_or_default(), &nodes)?;
    let numa = (!nodes.is_empty()).then(|| numa_info(&backend, &nodes));
    let info = DeviceInfo {
        device: Device::Cpu,
        threads: backend.threads(),
        isa: backend.isa().to_owned(),
        numa,
        turns: Some(backend.turns()),
    };
    Ok((backend, info))
}

/// The number of compute threads with this many CPUs: all of them, or one for each physical core of `nodes`.
fn default_threads(num_cpus: usize, nodes: &[NumaNode]) -> usize {
    let num_cpus = num_cpus.min(MAX_THREADS);
    match nodes.iter().map(|node| node.cores).min() {
        None => num_cpus,
        Some(cores) => cores.min(num_cpus / nodes.len()).max(1) * nodes.len(),
    }
}

/// The placement on `nodes`; logs what the system refuses.
fn numa_info(backend: &Cpu, nodes: &[NumaNode]) -> NumaInfo {
    let (pin_error, place_error) = (backend.pin_error(), backend.place_error());
    if let Some(error) = &pin_error {
        log::warn!("the system refuses to run threads on NUMA nodes: {error}");
    }
    if let Some(error) = &place_error {
        log::warn!("the system refuses to place memory on NUMA nodes: {error}");
    }
    NumaInfo {
        nodes: nodes.iter().map(|node| node.id as u32).collect(),
        cpus: nodes.iter().flat_map(|node| &node.cpus).map(|cpu| *cpu as u32).collect(),
        threads_pinned: pin_error.is_none(),
        memory_placed: place_error.is_none(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvidia_gpu_is_found_on_the_pci_bus() {
        let bus = std::env::temp_dir().join(format!("penstock-pci-{}", std::process::id()));
        let add = |address: &str, vendor: &str, class: &str| {
            let device = bus.join(address);
            fs::create_dir_all(&device).expect("a folder");
            for (name, number) in [("vendor", vendor), ("class", class)] {
                fs::write(device.join(name), format!("{number}\n")).expect("a file");
            }
        };
        assert!(!has_nvidia_gpu(&bus), "no bus");
        add("0000:00:01.0", "0x8086", "0x030000");
        add("0000:00:02.0", "0x10de", "0x040300");
        assert!(!has_nvidia_gpu(&bus), "the GPU of another vendor, and a sound card");
        add("0000:00:03.0", "0x10de", "0x030200");
        assert!(has_nvidia_gpu(&bus));
        fs::remove_dir_all(&bus).expect("removed");
    }

    #[test]
    fn default_threads_are_the_cpus_up_to_the_limit() {
        let threads = [1, MAX_THREADS, MAX_THREADS + 1].map(|cpus| default_threads(cpus, &[]));
        assert_eq!(threads, [1, MAX_THREADS, MAX_THREADS]);
    }

    #[test]
    fn default_threads_on_nodes_are_their_cores() {
        let node = |cores| NumaNode { id: 0, cpus: (0..2 * cores).collect(), cores };
        assert_eq!(default_threads(32, &[node(8), node(8)]), 16);
        assert_eq!(default_threads(32, &[node(8), node(5)]), 10, "the same number on each node");
        assert_eq!(default_threads(7, &[node(8), node(8)]), 6, "a quota of CPUs");
        assert_eq!(default_threads(1, &[node(8), node(8)]), 2);
    }
}
