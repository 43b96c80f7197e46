//! A program on a device, for tests: all kinds of objects, each used once.

use std::error::Error;
use std::sync::Arc;

use crate::{
    Argument, Context, CudaError, Device, DeviceMemory, Driver, Event, Grid, KernelCompiler, Module,
    PinnedMemory, Stream,
};

/// The norms of the rows of `x` by the kernel `rms_norm_f32`: `x` and `weight` are uploaded in one stream, the kernel
/// runs in another, and the result is downloaded in the first.
///
/// # Errors
///
/// Any error of the driver; everything is freed.
pub fn rms_norm(compiler: &KernelCompiler, x: &[f32], weight: &[f32]) -> Result<Vec<f32>, Box<dyn Error>> {
    let driver = Driver::open(None)?;
    let device = Device::read(&driver, 0)?;
    let context = Context::open(&driver, &device)?;
    let image = compiler.image("rms_norm.cu", &device.architecture())?;
    // SAFETY: the image is the compiler's.
    let kernel = unsafe { Module::load(&context, &image)? }.kernel("rms_norm_f32")?;
    let (copies, compute) = (Stream::new(&context)?, Stream::new(&context)?);
    let (uploaded, computed, done) = (Event::new(&context)?, Event::new(&context)?, Event::new(&context)?);
    let (source, weights) = (pinned(&context, x)?, pinned(&context, weight)?);
    let mut target = PinnedMemory::new(&context, size_of_val(x))?;
    let [input, output] =
        [DeviceMemory::new(&context, size_of_val(x))?, DeviceMemory::new(&context, size_of_val(x))?];
    let factors = DeviceMemory::new(&context, size_of_val(weight))?;
    let width = weight.len() as i32;
    let grid = Grid {
        blocks: [(x.len() / weight.len()) as u32, 1, 1],
        threads: 256,
        shared_bytes: 0,
        is_dependent: false,
    };
    let (pointers, epsilon) = ([input.pointer(), factors.pointer(), output.pointer()], 1e-6_f32);
    let [from, by, to] = pointers.each_ref().map(Argument::from);
    let arguments = [from, by, to, (&width).into(), (&epsilon).into()];
    // SAFETY: events order the copies and the kernel, whose memory has the sizes that its grid uses. It lives until both
    // streams have been waited for.
    let launched = (|| unsafe {
        copies.upload(&source, 0..size_of_val(x), &input)?;
        copies.upload(&weights, 0..size_of_val(weight), &factors)?;
        copies.record(&uploaded)?;
        compute.wait(&uploaded)?;
        kernel.launch(&compute, grid, &arguments)?;
        compute.record(&computed)?;
        copies.wait(&computed)?;
        copies.download(&output, &mut target, 0..size_of_val(x))?;
        copies.record(&done)?;
        done.synchronize()
    })();
    let ended = [copies.synchronize(), compute.synchronize()];
    launched?;
    ended.into_iter().collect::<Result<(), _>>()?;
    // SAFETY: a launch that is refused uses no memory.
    let refused = unsafe { kernel.launch(&compute, grid, &arguments[..4]) };
    if !matches!(refused, Err(CudaError::Arguments { .. })) {
        return Err("a launch without its last argument was not refused".into());
    }
    let words = target.bytes().chunks_exact(4);
    Ok(words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
}

fn pinned(context: &Arc<Context>, values: &[f32]) -> Result<PinnedMemory, CudaError> {
    let mut memory = PinnedMemory::new(context, size_of_val(values))?;
    for (word, value) in memory.bytes_mut().chunks_exact_mut(4).zip(values) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    Ok(memory)
}
