//! [`Device`]: a device as the driver describes it, and the [`Architecture`] of its kernels.

use std::ffi::{CStr, c_char, c_int};
use std::fmt::{self, Display, Formatter};
use std::ptr;

use crate::driver::{Driver, Handle, Ordinal};
use crate::error::CallError;
use crate::unavailable::MIN_COMPUTE_CAPABILITY;
use crate::{Unavailable, Version};

/// Numbers of the driver's attributes.
const MULTIPROCESSORS: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

/// The architecture that kernels are compiled for, such as `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// The compute capability.
    pub version: Version,
    /// Whether kernels use the instructions that devices of this compute capability alone have, such as wgmma.
    pub is_specific: bool,
}

impl Architecture {
    /// Those of the devices of a compute capability, the one with the most instructions first.
    pub fn of(version: Version) -> impl Iterator<Item = Self> {
        let specific = (version.major >= 9).then_some(Self { version, is_specific: true });
        let first = Version::new(version.major, 0);
        let versions = [version].into_iter().chain((version != first).then_some(first));
        specific.into_iter().chain(versions.map(|version| Self { version, is_specific: false }))
    }
}

impl Display for Architecture {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Version { major, minor } = self.version;
        write!(f, "sm_{major}{minor}{}", if self.is_specific { "a" } else { "" })
    }
}

/// A device of the driver. A MIG instance is a device, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its place among the visible devices.
    pub index: u32,
    /// The name of the product.
    pub name: String,
    /// The version of its instruction set.
    pub compute_capability: Version,
    /// The architecture of its kernels; by default, the one with the most instructions.
    pub architecture: Architecture,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub total_memory: u64,
    /// Its identifier, in the form of nvidia-smi without the prefix.
    pub uuid: String,
    /// Its address on the PCI bus.
    pub pci_address: String,
}

impl Device {
    /// Describes a device.
    pub fn read(driver: &Driver, index: u32) -> Result<Self, Unavailable> {
        let count = driver.num_devices()?;
        if index >= count {
            return Err(Unavailable::NoSuchDevice { index, count });
        }
        let ordinal = ordinal(driver, index)?;
        let functions = driver.functions();
        let attribute = |number| attribute(driver, ordinal, number);
        let compute_capability = Version::new(attribute(CAPABILITY_MAJOR)?, attribute(CAPABILITY_MINOR)?);
        let mut total = 0;
        // SAFETY: the pointer is valid.
        unsafe { functions.device_memory(&raw mut total, ordinal) }?;
        Ok(Self {
            index,
            // SAFETY: the driver may write as many bytes as the length says.
            name: text(|bytes, length| unsafe { functions.device_name(bytes, length, ordinal) })?,
            compute_capability,
            architecture: Architecture::of(compute_capability).next().expect("at least its own"),
            multiprocessors: attribute(MULTIPROCESSORS)?,
            total_memory: total as u64,
            uuid: uuid(driver, ordinal)?,
            // SAFETY: as above.
            pci_address: text(|bytes, length| unsafe { functions.device_address(bytes, length, ordinal) })?,
        })
    }

    /// An error if there can be no kernels for the device.
    pub fn check(&self) -> Result<(), Unavailable> {
        if self.compute_capability >= MIN_COMPUTE_CAPABILITY {
            return Ok(());
        }
        Err(Unavailable::OldDevice { name: self.name.clone(), capability: self.compute_capability })
    }

    /// Free bytes of the memory. Creates the device's primary context for the call, unless the process already has it.
    pub fn free_memory(&self, driver: &Driver) -> Result<u64, Unavailable> {
        let functions = driver.functions();
        let ordinal = ordinal(driver, self.index)?;
        let (mut previous, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the pointers are valid. The context is retained while it is current, and released once; the context
        // that was current before is current again.
        let free = unsafe {
            functions.current_context(&raw mut previous)?;
            functions.retain_context(&raw mut context, ordinal)?;
            let free = free_memory(driver, context);
            let restored = functions.set_context(previous);
            let released = functions.release_context(ordinal);
            free.and_then(|free| restored.and(released).map(|()| free))
        };
        Ok(free?)
    }
}

/// # Safety
///
/// The context must be retained.
unsafe fn free_memory(driver: &Driver, context: Handle) -> Result<u64, CallError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the context is alive and the pointers are valid.
    unsafe {
        driver.functions().set_context(context)?;
        driver.functions().memory_info(&raw mut free, &raw mut total)?;
    }
    Ok(free as u64)
}

/// The driver's handle of a device.
pub(crate) fn ordinal(driver: &Driver, index: u32) -> Result<Ordinal, CallError> {
    let mut ordinal = 0;
    // SAFETY: the pointer is valid, and any index may be passed.
    unsafe { driver.functions().device(&raw mut ordinal, index.cast_signed()) }?;
    Ok(ordinal)
}

/// An attribute of a device by its number.
pub(crate) fn attribute(driver: &Driver, ordinal: Ordinal, number: c_int) -> Result<u32, CallError> {
    let mut value = 0;
    // SAFETY: the pointer is valid.
    unsafe { driver.functions().device_attribute(&raw mut value, number, ordinal) }?;
    Ok(u32::try_from(value).unwrap_or_default())
}

/// A text that a function of the driver writes.
fn text(write: impl FnOnce(*mut c_char, c_int) -> Result<(), CallError>) -> Result<String, CallError> {
    // One byte more than the driver may write.
    let mut bytes = [0u8; 256];
    write(bytes.as_mut_ptr().cast::<c_char>(), bytes.len() as c_int - 1)?;
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn uuid(driver: &Driver, ordinal: Ordinal) -> Result<String, CallError> {
    let mut bytes = [0; 16];
    // SAFETY: the driver writes 16 bytes.
    unsafe { driver.functions().device_uuid(&raw mut bytes, ordinal) }?;
    let hex = bytes.map(|byte| format!("{byte:02x}")).concat();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &hex[range]);
    Ok(parts.join("-"))
}
