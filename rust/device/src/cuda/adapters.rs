//! LoRA adapters on the device.

/// The adapters that are loaded.
pub struct CudaAdapters;
