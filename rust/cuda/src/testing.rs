//! Programs on a device, for tests.

use std::error::Error;
use std::sync::Arc;
use std::{ptr, thread};

use crate::error::INVALID_VALUE;
use crate::{
    Argument, Context, CudaError, Device, DeviceMemory, DevicePointer, Driver, Event, GraphExec, Grid,
    Kernel, KernelCompiler, Module, PinnedMemory, Stream,
};

/// Shared memory of a launch that needs [`Kernel::set_shared_limit`].
const SHARED_BYTES: u32 = 60 << 10;
/// The size and the contents of what follows the norms.
const TAIL: usize = 64;
const TAIL_BYTE: u8 = 0x5a;

fn open() -> Result<(Device, Arc<Context>), Box<dyn Error>> {
    let driver = Driver::open(None)?;
    let device = Device::read(&driver, 0)?;
    let context = Context::open(&driver, &device)?;
    context.bind_thread()?;
    Ok((device, context))
}

/// The norms of the rows of `x` by the kernel `rms_norm_f32`, with all kinds of objects and operations: `x` is uploaded,
/// a graph with the kernel is launched, and the result is downloaded. The kernel reads `weight` in the memory of the
/// host.
///
/// # Errors
///
/// Any error of the driver; everything is freed.
pub fn rms_norm(compiler: &KernelCompiler, x: &[f32], weight: &[f32]) -> Result<Vec<f32>, Box<dyn Error>> {
    let (device, context) = open()?;
    let image = compiler.image("rms_norm.cu", "", &device.architecture.to_string())?;
    // SAFETY: the image is the compiler's.
    let kernel = unsafe { Module::load(&context, &image)? }.kernel("rms_norm_f32")?;
    let (stream, done) = (Stream::new(&context)?, Event::new(&context)?);
    let source = pinned(&context, x)?;
    let mut target = PinnedMemory::new(&context, source.len() + TAIL)?;
    let norms = Norms {
        rows: DeviceMemory::new(&context, target.len())?,
        staged: DeviceMemory::new(&context, source.len())?,
        weight: pinned(&context, weight)?,
        num_rows: (x.len() / weight.len()) as u32,
        width: weight.len() as i32,
    };
    let free = context.memory()?.0;
    if free + target.len() > device.total_memory as usize {
        return Err("the memory of the program is not counted".into());
    }
    let graph = norms.capture(&kernel, &stream)?;
    // SAFETY: the copies and the graph use memory of their sizes, which lives until the stream has been waited for.
    let launched = (|| unsafe {
        stream.upload(&source, 0..source.len(), norms.staged.pointer())?;
        graph.launch(&stream)?;
        let length = target.len();
        stream.download(norms.rows.pointer(), &mut target, 0..length)?;
        stream.record(&done)?;
        while !done.query()? {
            thread::yield_now();
        }
        done.synchronize()
    })();
    let ended = stream.synchronize();
    launched.and(ended)?;
    norms.check_refusals(&kernel, &stream)?;
    let (rows, tail) = target.bytes().split_at(source.len());
    if tail != [TAIL_BYTE; TAIL] {
        return Err("the bytes behind the norms are wrong".into());
    }
    let words = rows.chunks_exact(4);
    Ok(words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
}

fn pinned(context: &Arc<Context>, values: &[f32]) -> Result<PinnedMemory, CudaError> {
    let mut memory = PinnedMemory::new(context, size_of_val(values))?;
    for (word, value) in memory.bytes_mut().chunks_exact_mut(4).zip(values) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    Ok(memory)
}

/// The memory of the program, with the norms and a tail, the rows and the weight.
struct Norms {
    rows: DeviceMemory,
    staged: DeviceMemory,
    weight: PinnedMemory,
    num_rows: u32,
    width: i32,
}

impl Norms {
    /// A graph that writes the norms of the rows and the tail.
    fn capture(&self, kernel: &Kernel, stream: &Stream) -> Result<GraphExec, CudaError> {
        let (rows, bytes) = (self.rows.pointer(), self.staged.len());
        kernel.set_shared_limit(SHARED_BYTES)?;
        stream.begin_capture()?;
        // SAFETY: the memory has the sizes that the operations use, and lives while the graph is used.
        let captured = (|| unsafe {
            stream.fill(rows.offset(bytes), TAIL_BYTE, TAIL)?;
            self.launch(kernel, stream, SHARED_BYTES, 5)
        })();
        let graph = stream.end_capture();
        captured.and(graph)
    }

    /// # Safety
    ///
    /// See [`Kernel::launch`].
    unsafe fn launch(
        &self,
        kernel: &Kernel,
        stream: &Stream,
        shared_bytes: u32,
        num_arguments: usize,
    ) -> Result<(), CudaError> {
        let grid = Grid { blocks: [self.num_rows, 1, 1], threads: 256, shared_bytes, is_dependent: false };
        let pointers = [self.staged.pointer(), self.weight.device_pointer(), self.rows.pointer()];
        let [from, by, to] = pointers.each_ref().map(Argument::from);
        let arguments = [from, by, to, (&self.width).into(), (&1e-6_f32).into()];
        // SAFETY: the caller's.
        unsafe { kernel.launch(stream, grid, &arguments[..num_arguments]) }
    }

    /// An error unless launches with too few arguments or too much shared memory are refused.
    fn check_refusals(&self, kernel: &Kernel, stream: &Stream) -> Result<(), Box<dyn Error>> {
        // SAFETY: a launch that is refused uses no memory.
        let (few, large) =
            unsafe { (self.launch(kernel, stream, 0, 4), self.launch(kernel, stream, SHARED_BYTES + 1, 5)) };
        if !matches!(few, Err(CudaError::Arguments { .. })) {
            return Err("a launch without its last argument was not refused".into());
        }
        match large {
            Err(CudaError::Call(error)) if error.code() == INVALID_VALUE => Ok(()),
            _ => Err("a launch beyond the limit of shared memory was not refused".into()),
        }
    }
}

/// Defects that an emulated driver finds: an allocation inside a step, and the use of a range that is free.
///
/// # Errors
///
/// Any error of the driver, or none of them is emulated.
pub fn defects() -> Result<(), Box<dyn Error>> {
    let (_, context) = open()?;
    let observer = context.observer().ok_or("the driver is not emulated")?;
    let stream = Stream::new(&context)?;
    observer.arm(true);
    let memory = DeviceMemory::new(&context, 2 * TAIL);
    observer.arm(false);
    let memory = memory?;
    stream.report_region(memory.pointer(), TAIL, false);
    for part in [TAIL, 0] {
        // SAFETY: the memory has this size, and lives until the stream has been waited for.
        unsafe { stream.fill(memory.pointer().offset(part), 0, TAIL) }?;
    }
    Ok(stream.synchronize()?)
}

/// Loses the device by a kernel with addresses that do not exist, and uses it again in a new context.
///
/// # Errors
///
/// Any other error of the driver, or a call that succeeds on the lost device.
pub fn lost(compiler: &KernelCompiler) -> Result<(), Box<dyn Error>> {
    let (device, context) = open()?;
    let image = compiler.image("rms_norm.cu", "", &device.architecture.to_string())?;
    // SAFETY: the image is the compiler's.
    let kernel = unsafe { Module::load(&context, &image)? }.kernel("rms_norm_f32")?;
    let (stream, event) = (Stream::new(&context)?, Event::new(&context)?);
    let memory = DeviceMemory::new(&context, TAIL)?;
    let grid = Grid { blocks: [1, 1, 1], threads: 256, shared_bytes: 0, is_dependent: false };
    let [nowhere, width] = [(&DevicePointer::NULL).into(), (&1_i32).into()];
    // SAFETY: the kernel fails, which is the purpose of the program.
    unsafe { kernel.launch(&stream, grid, &[nowhere, nowhere, nowhere, width, (&1e-6_f32).into()]) }?;
    for lost in [stream.synchronize(), stream.record(&event), Event::new(&context).map(drop)] {
        if !lost.is_err_and(|error| error.is_sticky()) {
            return Err("the error is not sticky".into());
        }
    }
    drop((stream, event, memory, kernel, context));
    let (_, context) = open()?;
    Stream::new(&context)?.synchronize()?;
    Ok(())
}

/// Uses each constructor in a thread of its own, and drops the objects in another one.
///
/// # Errors
///
/// Any error of the driver, or that a thread has a context after a call that leaves none.
pub fn threads(compiler: &KernelCompiler) -> Result<(), Box<dyn Error>> {
    let driver = Driver::open(None)?;
    let device = Device::read(&driver, 0)?;
    let image = compiler.image("rms_norm.cu", "", &device.architecture.to_string())?;
    let context = unbound(&driver, || Context::open(&driver, &device))??;
    unbound(&driver, || context.memory())??;
    let stream = unbound(&driver, || Stream::new(&context))??;
    let event = unbound(&driver, || Event::new(&context))??;
    let pinned = unbound(&driver, || PinnedMemory::new(&context, TAIL))??;
    let memory = unbound(&driver, || DeviceMemory::new(&context, TAIL))??;
    // SAFETY: the image is the compiler's.
    let module = unbound(&driver, || unsafe { Module::load(&context, &image) })??;
    unbound(&driver, move || drop((stream, event, pinned, memory, module, context)))
}

/// The result of a call in a new thread, which has no context afterwards.
fn unbound<T: Send>(driver: &Driver, call: impl FnOnce() -> T + Send) -> Result<T, Box<dyn Error>> {
    let functions = driver.functions();
    let run = || {
        let result = call();
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is valid.
        let read = unsafe { functions.current_context(&raw mut current) };
        (result, read.is_ok() && current.is_null())
    };
    let (result, is_unbound) =
        thread::scope(|scope| scope.spawn(run).join()).map_err(|_| "a thread panicked")?;
    if is_unbound { Ok(result) } else { Err("the thread has a context".into()) }
}

/// Drops all kinds of objects in a child of a fork, between two lines on standard error.
///
/// # Errors
///
/// Any error of the driver.
#[cfg(unix)]
pub fn fork() -> Result<(), Box<dyn Error>> {
    let (_, context) = open()?;
    let objects = (
        Stream::new(&context)?,
        Event::new(&context)?,
        PinnedMemory::new(&context, TAIL)?,
        DeviceMemory::new(&context, TAIL)?,
        context,
    );
    // SAFETY: the child runs the code below only, which needs no lock that another thread may have.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => {
            eprintln!("child begins");
            drop(objects);
            eprintln!("child ends");
            // SAFETY: the process is the child.
            unsafe { libc::_exit(0) }
        }
        child => {
            // SAFETY: a null pointer is allowed.
            unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
            Ok(())
        }
    }
}
