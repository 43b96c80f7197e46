//! An asynchronous backend around the CPU's: calls are queued for a thread of its own, and tokens are published late
//! and in bursts. Only `collect`, `download`, `synchronize` and allocations wait for the thread.

mod device_thread;

use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, MutexGuard};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use crossbeam_channel::{Sender, bounded, unbounded};
use penstock_device::cpu::{
    Cpu, CpuAdapterLayout, CpuAdapters, CpuBuffer, CpuCache, CpuMatrix, CpuOperand, CpuRope, CpuScratch,
    CpuSlots,
};
use penstock_device::{
    AdapterSpec, AdapterUpdates, Allocation, AvailableMemory, CacheSpec, Compute, DeviceError, HeadNorms,
    LayerAttention, LayerHeads, Load, MatrixPart, Memory, MemoryUse, PackedLayout, PlannedMatrix, RowSource,
    Sample, Sampled, SamplingBatch, SlotParams, StepInputs, StepSpec,
};
use penstock_types::{BlockCopy, Epilogue, FieldError, HeadShape, KvDtype, PackedAdapter, WeightFormat};

pub use device_thread::Control;
use device_thread::{Job, Shared, Ticket, lock, run, shared};

pub struct AsyncCpu {
    cpu: Shared<Cpu>,
    commands: Option<Sender<Job>>,
    /// The inputs of the step that the device thread has reached.
    step: Shared<StepInputs>,
    /// Blocks of the host tier of the cache.
    host_blocks: usize,
    error: Shared<Option<DeviceError>>,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl AsyncCpu {
    pub fn new(threads: usize) -> (Self, Arc<Control>) {
        let (commands, queue) = unbounded();
        let (cpu, error, control) =
            (shared(Cpu::new(threads).unwrap()), shared(None), Arc::new(Control::default()));
        let thread = {
            let (cpu, error, control) = (Arc::clone(&cpu), Arc::clone(&error), Arc::clone(&control));
            thread::spawn(move || run(&queue, &cpu, &error, &control))
        };
        let device = Self {
            cpu,
            commands: Some(commands),
            step: shared(StepInputs::default()),
            host_blocks: 0,
            error,
            control: Arc::clone(&control),
            thread: Some(thread),
        };
        (device, control)
    }

    fn submit(&self, job: Job) {
        self.commands.as_ref().unwrap().send(job).unwrap();
    }

    fn enqueue(
        &self,
        command: impl FnOnce(&mut Cpu) -> Result<(), DeviceError> + Send + 'static,
    ) -> Result<(), DeviceError> {
        self.submit(Job::Run(Box::new(command)));
        Ok(())
    }

    /// The CPU, when everything submitted is complete.
    fn idle(&mut self) -> Result<MutexGuard<'_, Cpu>, DeviceError> {
        self.synchronize()?;
        Ok(lock(&self.cpu))
    }
}

impl Drop for AsyncCpu {
    fn drop(&mut self) {
        self.control.release();
        drop(self.commands.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Writes methods that the CPU answers at once.
macro_rules! ask {
    () => {};
    (fn $name:ident(&mut $self:ident $(, $argument:ident: $type:ty)*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&mut $self $(, $argument: $type)*) $(-> $result)? { lock(&$self.cpu).$name($($argument),*) }
        ask! { $($rest)* }
    };
    (fn $name:ident(&$self:ident $(, $argument:ident: $type:ty)*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&$self $(, $argument: $type)*) $(-> $result)? { lock(&$self.cpu).$name($($argument),*) }
        ask! { $($rest)* }
    };
}

/// Writes methods that make something when everything submitted is complete.
macro_rules! make {
    ($(fn $name:ident(&mut $self:ident $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        $(fn $name(&mut $self $(, $argument: $type)*) -> Result<Shared<$result>, DeviceError> {
            $self.idle()?.$name($($argument),*).map(shared)
        })*
    };
}

/// Writes methods that submit a call of the CPU with shared values. `[step]` is the step that was uploaded last.
macro_rules! submit {
    ($(
        fn $name:ident(&mut $self:ident, $($argument:tt: $type:ty),*) $([$step:ident])?:
        |$cpu:ident, $($value:ident),*| $call:expr;
    )*) => {$(
        fn $name(&mut $self, $($argument: $type),*) -> Result<(), DeviceError> {
            $(let $step = &$self.step;)?
            submit_call!($self, |$cpu, $($value),*| $call)
        }
    )*};
}

/// Submits a call of the CPU with shared values.
macro_rules! submit_call {
    ($self:ident, |$cpu:ident, $($value:ident),*| $call:expr) => {{
        $(let $value = Arc::clone($value);)*
        $self.enqueue(move |$cpu| {
            $(
                #[allow(unused_mut, reason = "some are only read")]
                let mut $value = lock(&$value);
            )*
            $call
        })
    }};
}

impl Memory for AsyncCpu {
    type Buffer = Shared<CpuBuffer>;
    type Operand = Shared<CpuOperand>;
    type Scratch = Shared<CpuScratch>;
    type Cache = Shared<CpuCache>;

    ask! {
        fn bytes(&self, allocation: Allocation<'_>) -> u64;
        fn block_bytes(&self, cache: &CacheSpec) -> u64;
        fn host_buffer_bytes(&self, step: &StepSpec, adapters: Option<&AdapterSpec>) -> u64;
        fn host_memory(&self) -> Option<u64>;
        fn available_memory(&self) -> Result<AvailableMemory, DeviceError>;
        fn reserve_outside(&mut self, bytes: u64);
        fn memory(&self) -> MemoryUse;
    }

    make! {
        fn allocate(&mut self, len: usize) -> CpuBuffer;
        fn allocate_operand(&mut self, rows: usize, columns: usize) -> CpuOperand;
        fn allocate_scratch(&mut self, step: &StepSpec) -> CpuScratch;
    }

    fn allocate_cache(&mut self, cache: &CacheSpec) -> Result<Self::Cache, DeviceError> {
        self.host_blocks = cache.host_blocks;
        self.idle()?.allocate_cache(cache).map(shared)
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.idle()?.reserve(bytes)
    }

    fn copy_blocks(
        &mut self,
        cache: &mut Self::Cache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        assert!(self.host_blocks > 0, "copies without a host tier");
        let copies: Vec<_> = copies.collect();
        submit_call!(self, |cpu, cache| cpu.copy_blocks(&mut cache, &mut copies.into_iter()))
    }

    fn download(&mut self, x: &Self::Buffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        self.idle()?.download(&lock(x), start, out)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        let (answer, complete) = bounded(1);
        self.submit(Job::Barrier(answer));
        complete.recv().unwrap();
        lock(&self.error).take().map_or(Ok(()), Err)
    }
}

impl Load for AsyncCpu {
    type Matrix = Shared<CpuMatrix>;
    type Vector = Shared<CpuBuffer>;
    type Rope = Shared<CpuRope>;
    type Adapters = Shared<CpuAdapters>;
    type AdapterLayout = CpuAdapterLayout;

    ask! {
        fn check_cache(&self, heads: HeadShape, dtype: KvDtype) -> Result<(), FieldError>;
        fn supports(&self, format: WeightFormat, columns: usize) -> bool;
        fn activations(&self, format: WeightFormat) -> &'static str;
        fn prepare(&mut self, matrices: &[PlannedMatrix], cache: &CacheSpec, has_adapters: bool)
            -> Result<(), DeviceError>;
        fn packed_layout(&self) -> PackedLayout;
        fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64;
        fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]);
        fn copies_mapped(&self) -> bool;
    }

    make! {
        fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> CpuMatrix;
        fn map_matrix(&mut self, columns: usize, parts: &[(usize, WeightFormat)], bytes: Bytes) -> CpuMatrix;
        fn load_vector(&mut self, values: &[f32]) -> CpuBuffer;
        fn load_rope(&mut self, table: &dyn RowSource, step: &StepSpec) -> CpuRope;
        fn allocate_adapters(&mut self, adapters: &AdapterSpec, step: &StepSpec) -> CpuAdapters;
    }

    fn load_adapter(
        &mut self,
        adapters: &mut Self::Adapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        self.idle()?.load_adapter(&mut lock(adapters), number, adapter)
    }

    submit! {
        fn unload_adapter(&mut self, adapters: &mut Self::Adapters, number: u32):
            |cpu, adapters| cpu.unload_adapter(&mut adapters, number);
    }
}

impl Sample for AsyncCpu {
    type Slots = Shared<CpuSlots>;
    type Ticket = Arc<Ticket>;

    make! {
        fn allocate_slots(&mut self, step: &StepSpec) -> CpuSlots;
    }

    fn admit_slot(
        &mut self,
        slots: &mut Self::Slots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        if self.control.fails_admission.swap(false, SeqCst) {
            return Err(DeviceError::InvalidStep("no admission".into()));
        }
        let SlotParams { seed, min_tokens, logprobs, prompt_logprobs, .. } = *params;
        let (sampling, prompt) = (params.sampling.clone(), Arc::clone(params.prompt));
        let (generated, stop_token_ids) = (params.generated.to_vec(), params.stop_token_ids.to_vec());
        submit_call!(self, |cpu, slots| {
            let (sampling, prompt) = (&sampling, &prompt);
            let (generated, stop_token_ids) = (&generated[..], &stop_token_ids[..]);
            let params = SlotParams {
                sampling,
                seed,
                prompt,
                generated,
                min_tokens,
                stop_token_ids,
                logprobs,
                prompt_logprobs,
            };
            cpu.admit_slot(&mut slots, slot, &params)
        })
    }

    submit! {
        fn free_slot(&mut self, slots: &mut Self::Slots, slot: u32): |cpu, slots| cpu.free_slot(&mut slots, slot);
    }

    fn sample(
        &mut self,
        logits: &Self::Buffer,
        batch: &SamplingBatch,
        slots: &mut Self::Slots,
        scratch: &mut Self::Scratch,
    ) -> Result<Arc<Ticket>, DeviceError> {
        self.control.num_submitted.fetch_add(1, SeqCst);
        let (logits, batch) = (Arc::clone(logits), batch.clone());
        let (slots, scratch) = (Arc::clone(slots), Arc::clone(scratch));
        let ticket = Arc::new(Ticket::default());
        let command = move |cpu: &mut Cpu| {
            let inner = cpu.sample(&lock(&logits), &batch, &mut lock(&slots), &mut lock(&scratch))?;
            let mut results = Vec::new();
            cpu.collect(inner, &mut results)?;
            Ok(results)
        };
        self.submit(Job::Sample(Arc::clone(&ticket), Box::new(command)));
        Ok(ticket)
    }

    fn poll(&mut self, ticket: &mut Arc<Ticket>, waker: &Waker) -> Poll<()> {
        *lock(&ticket.waker) = Some(waker.clone());
        match *lock(&ticket.results) {
            Some(_) => Poll::Ready(()),
            None => Poll::Pending,
        }
    }

    fn collect(&mut self, ticket: Arc<Ticket>, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        let results = lock(&ticket.results);
        let mut results = ticket.published.wait_while(results, |results| results.is_none()).unwrap();
        *out = results.take().unwrap()?;
        lock(&self.error).take().map_or(Ok(()), Err)
    }
}

impl Compute for AsyncCpu {
    /// The inputs are copied; operations read those that were uploaded last.
    type Step<'a> = ();

    ask! {
        fn is_deterministic(&self) -> bool;
        fn bind_thread(&mut self);
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn upload(
        &mut self,
        inputs: &StepInputs,
        rope: &mut Self::Rope,
        slots: &Self::Slots,
        cache: &Self::Cache,
        adapters: Option<&Self::Adapters>,
    ) -> Result<(), DeviceError> {
        self.control.num_steps.fetch_add(1, SeqCst);
        let (step, inputs, adapters) = (&self.step, inputs.clone(), adapters.map(Arc::clone));
        submit_call!(self, |cpu, step, rope, slots, cache| {
            let adapters = adapters.as_ref().map(|adapters| lock(adapters));
            cpu.upload(&inputs, &mut rope, &slots, &cache, adapters.as_deref())?;
            *step = inputs;
            Ok(())
        })
    }

    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &Self::Operand,
        weight: &Self::Matrix,
        epilogue: Epilogue<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        self.control.num_rows.fetch_add(rows.len(), SeqCst);
        let bias = epilogue.bias().map(|bias| Arc::clone(bias));
        let epilogue = epilogue.map(|_| ());
        submit_call!(self, |cpu, x, weight, out| {
            let bias = bias.as_ref().map(|bias| lock(bias));
            let epilogue = epilogue.map(|()| bias.as_deref().unwrap());
            cpu.linear(rows, &x, &weight, epilogue, &mut out)
        })
    }

    fn add_adapters(
        &mut self,
        updates: AdapterUpdates<'_, (), Self::Adapters>,
        x: &Self::Operand,
        weight: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        let AdapterUpdates { step: (), rows, matrix, adapters } = updates;
        let step = &self.step;
        submit_call!(self, |cpu, step, adapters, x, weight, out| {
            let updates = AdapterUpdates { step: &*step, rows, matrix, adapters: &mut *adapters };
            cpu.add_adapters(updates, &x, &weight, &mut out)
        })
    }

    fn rope_write_kv(
        &mut self,
        (): (),
        rope: &Self::Rope,
        LayerHeads { shape, norms, layer }: LayerHeads<'_, Self::Vector>,
        qkv: &mut Self::Buffer,
        cache: &mut Self::Cache,
    ) -> Result<(), DeviceError> {
        let norms = norms.map(|norms| (Arc::clone(norms.query), Arc::clone(norms.key), norms.epsilon));
        let step = &self.step;
        submit_call!(self, |cpu, step, rope, qkv, cache| {
            let norms = norms.as_ref().map(|(query, key, epsilon)| (lock(query), lock(key), *epsilon));
            let norms = norms.as_ref();
            let norms = norms.map(|(query, key, epsilon)| HeadNorms {
                query: &**query,
                key: &**key,
                epsilon: *epsilon,
            });
            cpu.rope_write_kv(&step, &rope, LayerHeads { shape, norms, layer }, &mut qkv, &mut cache)
        })
    }

    fn attention(
        &mut self,
        reader: &Self::Matrix,
        (): (),
        LayerAttention { shape, params, cache, layer }: LayerAttention<'_, Self::Cache>,
        qkv: &mut Self::Buffer,
        scratch: &mut Self::Scratch,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError> {
        let step = &self.step;
        submit_call!(self, |cpu, reader, step, cache, qkv, scratch, out| {
            let attention = LayerAttention { shape, params, cache: &*cache, layer };
            cpu.attention(&reader, &step, attention, &mut qkv, &mut scratch, &mut out)
        })
    }

    submit! {
        fn embed(&mut self, _: (), slots: &Self::Slots, table: &Self::Matrix, out: &mut Self::Buffer) [step]:
            |cpu, step, slots, table, out| cpu.embed(&step, &slots, &table, &mut out);

        fn rms_norm(&mut self, rows: usize, x: &Self::Buffer, weight: &Self::Vector, epsilon: f32,
            out: &mut Self::Buffer):
            |cpu, x, weight, out| cpu.rms_norm(rows, &x, &weight, epsilon, &mut out);

        fn rms_norm_for(&mut self, reader: &Self::Matrix, rows: usize, x: &Self::Buffer, weight: &Self::Vector,
            epsilon: f32, out: &mut Self::Operand):
            |cpu, reader, x, weight, out| cpu.rms_norm_for(&reader, rows, &x, &weight, epsilon, &mut out);

        fn silu_mul(&mut self, reader: &Self::Matrix, rows: usize, width: usize, gate_up: &Self::Buffer,
            out: &mut Self::Operand):
            |cpu, reader, gate_up, out| cpu.silu_mul(&reader, rows, width, &gate_up, &mut out);

        fn gather(&mut self, _: (), width: usize, x: &Self::Buffer, out: &mut Self::Buffer) [step]:
            |cpu, step, x, out| cpu.gather(&step, width, &x, &mut out);

        fn gather_operand(&mut self, reader: &Self::Matrix, _: (), x: &Self::Operand, out: &mut Self::Operand)
            [step]: |cpu, reader, step, x, out| cpu.gather_operand(&reader, &step, &x, &mut out);
    }
}
