//! The duties of a CUDA device, except for sampling, which is beside its kernels in `sampling/`.

mod compute;
mod load;
mod memory;

pub(super) use memory::DOWNLOAD_BYTES;
