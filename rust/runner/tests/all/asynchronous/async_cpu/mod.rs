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
use penstock_device::cpu::Cpu;
use penstock_device::{
    AdapterSpec, Backend, CacheSpec, DeviceError, MatrixPart, MemoryUse, PackedLayout, RowSource, Sampled,
    SamplingBatch, SlotParams, StepInputs, StepRows, StepSpec,
};
use penstock_types::{
    AttentionParams, BlockCopy, Epilogue, HeadShape, LowRankShape, PackedAdapter, WeightFormat,
};

pub use device_thread::Control;
use device_thread::{Job, Shared, Ticket, lock, run, shared};

pub struct AsyncCpu {
    cpu: Shared<Cpu>,
    commands: Option<Sender<Job>>,
    /// The inputs of the step that the device thread has reached.
    step: Shared<StepInputs>,
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

/// A cache and whether it has a host tier.
pub struct AsyncCache {
    cache: Shared<<Cpu as Backend>::Cache>,
    host_blocks: usize,
}

impl Backend for AsyncCpu {
    type Matrix = Shared<<Cpu as Backend>::Matrix>;
    type Vector = Shared<<Cpu as Backend>::Vector>;
    type Buffer = Shared<<Cpu as Backend>::Buffer>;
    type Operand = Shared<<Cpu as Backend>::Operand>;
    type Scratch = Shared<<Cpu as Backend>::Scratch>;
    type Cache = AsyncCache;
    type Rope = Shared<<Cpu as Backend>::Rope>;
    type Slots = Shared<<Cpu as Backend>::Slots>;
    type Adapters = Shared<<Cpu as Backend>::Adapters>;
    /// The inputs are copied; operations read those that were uploaded last.
    type Step<'a> = ();
    type Ticket = Arc<Ticket>;
    type Turn = ();

    fn available_memory(&self) -> Result<u64, DeviceError> {
        lock(&self.cpu).available_memory()
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.idle()?.reserve(bytes)
    }

    fn host_memory(&self) -> Option<u64> {
        None
    }

    fn host_buffer_bytes(&self, _: &StepSpec, _: Option<&AdapterSpec>) -> u64 {
        0
    }

    fn reserve_outside(&mut self, bytes: u64) {
        lock(&self.cpu).reserve_outside(bytes);
    }

    fn memory(&self) -> MemoryUse {
        lock(&self.cpu).memory()
    }

    fn supports(&self, format: WeightFormat, columns: usize) -> bool {
        lock(&self.cpu).supports(format, columns)
    }

    fn activations(&self, format: WeightFormat) -> &'static str {
        lock(&self.cpu).activations(format)
    }

    fn matrix_bytes(&self, columns: usize, parts: &[(usize, WeightFormat)]) -> u64 {
        lock(&self.cpu).matrix_bytes(columns, parts)
    }

    fn buffer_bytes(&self, len: usize) -> u64 {
        lock(&self.cpu).buffer_bytes(len)
    }

    fn operand_bytes(&self, rows: usize, columns: usize) -> u64 {
        lock(&self.cpu).operand_bytes(rows, columns)
    }

    fn rope_bytes(&self, positions: usize, spec: &StepSpec) -> u64 {
        lock(&self.cpu).rope_bytes(positions, spec)
    }

    fn scratch_bytes(&self, spec: &StepSpec) -> u64 {
        lock(&self.cpu).scratch_bytes(spec)
    }

    fn slots_bytes(&self, spec: &StepSpec) -> u64 {
        lock(&self.cpu).slots_bytes(spec)
    }

    fn block_bytes(&self, spec: &CacheSpec) -> u64 {
        lock(&self.cpu).block_bytes(spec)
    }

    fn cache_bytes(&self, spec: &CacheSpec, blocks: usize) -> u64 {
        lock(&self.cpu).cache_bytes(spec, blocks)
    }

    fn adapters_bytes(&self, adapters: &AdapterSpec, spec: &StepSpec) -> u64 {
        lock(&self.cpu).adapters_bytes(adapters, spec)
    }

    fn shared_adapters_bytes(&self, adapters: &AdapterSpec) -> u64 {
        lock(&self.cpu).shared_adapters_bytes(adapters)
    }

    fn low_rank_bytes(shape: &LowRankShape) -> usize {
        Cpu::low_rank_bytes(shape)
    }

    fn adapter_bytes(packed: u64) -> u64 {
        Cpu::adapter_bytes(packed)
    }

    fn pack_low_rank(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
        Cpu::pack_low_rank(shape, a, b, out);
    }

    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<Self::Matrix, DeviceError> {
        self.idle()?.load_matrix(parts).map(shared)
    }

    fn packed_layout(&self) -> PackedLayout {
        lock(&self.cpu).packed_layout()
    }

    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64 {
        lock(&self.cpu).packed_bytes(columns, rows, format)
    }

    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]) {
        lock(&self.cpu).pack(part, out);
    }

    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<Self::Matrix, DeviceError> {
        self.idle()?.map_matrix(columns, parts, bytes).map(shared)
    }

    fn copies_mapped(&self) -> bool {
        lock(&self.cpu).copies_mapped()
    }

    fn bind_thread(&mut self) {
        lock(&self.cpu).bind_thread();
    }

    fn turn(&self) {}

    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError> {
        self.idle()?.load_vector(values).map(shared)
    }

    fn load_rope(&mut self, table: &dyn RowSource, spec: &StepSpec) -> Result<Self::Rope, DeviceError> {
        self.idle()?.load_rope(table, spec).map(shared)
    }

    fn allocate(&mut self, len: usize) -> Result<Self::Buffer, DeviceError> {
        self.idle()?.allocate(len).map(shared)
    }

    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<Self::Operand, DeviceError> {
        self.idle()?.allocate_operand(rows, columns).map(shared)
    }

    fn allocate_scratch(&mut self, spec: &StepSpec) -> Result<Self::Scratch, DeviceError> {
        self.idle()?.allocate_scratch(spec).map(shared)
    }

    fn allocate_slots(&mut self, spec: &StepSpec) -> Result<Self::Slots, DeviceError> {
        self.idle()?.allocate_slots(spec).map(shared)
    }

    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<Self::Cache, DeviceError> {
        let cache = self.idle()?.allocate_cache(spec).map(shared)?;
        Ok(AsyncCache { cache, host_blocks: spec.host_blocks })
    }

    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        spec: &StepSpec,
    ) -> Result<Self::Adapters, DeviceError> {
        self.idle()?.allocate_adapters(adapters, spec).map(shared)
    }

    fn load_adapter(
        &mut self,
        adapters: &mut Self::Adapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        let adapters = Arc::clone(adapters);
        self.idle()?.load_adapter(&mut lock(&adapters), number, adapter)
    }

    fn unload_adapter(&mut self, adapters: &mut Self::Adapters, number: u32) -> Result<(), DeviceError> {
        let adapters = Arc::clone(adapters);
        self.enqueue(move |cpu| cpu.unload_adapter(&mut lock(&adapters), number))
    }

    fn copy_blocks(
        &mut self,
        cache: &mut AsyncCache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        assert!(cache.host_blocks > 0, "copies without a host tier");
        let (cache, copies) = (Arc::clone(&cache.cache), copies.collect::<Vec<_>>());
        self.enqueue(move |cpu| cpu.copy_blocks(&mut lock(&cache), &mut copies.into_iter()))
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
        let SlotParams {
            sampling,
            seed,
            prompt,
            generated,
            min_tokens,
            stop_token_ids,
            logprobs,
            prompt_logprobs,
        } = *params;
        let (slots, sampling, prompt) = (Arc::clone(slots), sampling.clone(), Arc::clone(prompt));
        let (generated, stop_token_ids) = (generated.to_vec(), stop_token_ids.to_vec());
        self.enqueue(move |cpu| {
            let params = SlotParams {
                sampling: &sampling,
                seed,
                prompt: &prompt,
                generated: &generated,
                min_tokens,
                stop_token_ids: &stop_token_ids,
                logprobs,
                prompt_logprobs,
            };
            cpu.admit_slot(&mut lock(&slots), slot, &params)
        })
    }

    fn free_slot(&mut self, slots: &mut Self::Slots, slot: u32) -> Result<(), DeviceError> {
        let slots = Arc::clone(slots);
        self.enqueue(move |cpu| cpu.free_slot(&mut lock(&slots), slot))
    }

    fn upload(
        &mut self,
        inputs: &StepInputs,
        rope: &mut Self::Rope,
        slots: &Self::Slots,
        cache: &AsyncCache,
        adapters: Option<&Self::Adapters>,
    ) -> Result<(), DeviceError> {
        self.control.num_steps.fetch_add(1, SeqCst);
        let (step, inputs) = (Arc::clone(&self.step), inputs.clone());
        let (rope, slots, cache) = (Arc::clone(rope), Arc::clone(slots), Arc::clone(&cache.cache));
        let adapters = adapters.map(Arc::clone);
        self.enqueue(move |cpu| {
            let adapters = adapters.as_ref().map(|adapters| lock(adapters));
            cpu.upload(&inputs, &mut lock(&rope), &lock(&slots), &lock(&cache), adapters.as_deref())?;
            *lock(&step) = inputs;
            Ok(())
        })
    }

    fn embed(
        &mut self,
        (): (),
        slots: &Self::Slots,
        table: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        let (step, slots) = (Arc::clone(&self.step), Arc::clone(slots));
        let (table, out) = (Arc::clone(table), Arc::clone(out));
        self.enqueue(move |cpu| cpu.embed(&lock(&step), &lock(&slots), &lock(&table), &mut lock(&out)))
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        let (x, weight, out) = (Arc::clone(x), Arc::clone(weight), Arc::clone(out));
        self.enqueue(move |cpu| cpu.rms_norm(rows, &lock(&x), &lock(&weight), epsilon, &mut lock(&out)))
    }

    fn rms_norm_for(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError> {
        let (reader, x, weight) = (Arc::clone(reader), Arc::clone(x), Arc::clone(weight));
        let out = Arc::clone(out);
        self.enqueue(move |cpu| {
            let (reader, x, weight) = (lock(&reader), lock(&x), lock(&weight));
            cpu.rms_norm_for(&reader, rows, &x, &weight, epsilon, &mut lock(&out))
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
        let (x, weight, out) = (Arc::clone(x), Arc::clone(weight), Arc::clone(out));
        let bias = epilogue.bias().map(|bias| Arc::clone(bias));
        let epilogue = epilogue.map(|_| ());
        self.enqueue(move |cpu| {
            let bias = bias.as_ref().map(|bias| lock(bias));
            let epilogue = epilogue.map(|()| bias.as_deref().unwrap());
            cpu.linear(rows, &lock(&x), &lock(&weight), epilogue, &mut lock(&out))
        })
    }

    fn add_adapters(
        &mut self,
        (): (),
        rows: StepRows,
        x: &Self::Operand,
        weight: &Self::Matrix,
        matrix: u32,
        adapters: &mut Self::Adapters,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        let (step, x, weight) = (Arc::clone(&self.step), Arc::clone(x), Arc::clone(weight));
        let (adapters, out) = (Arc::clone(adapters), Arc::clone(out));
        self.enqueue(move |cpu| {
            let (step, x, weight) = (lock(&step), lock(&x), lock(&weight));
            cpu.add_adapters(&step, rows, &x, &weight, matrix, &mut lock(&adapters), &mut lock(&out))
        })
    }

    fn rope_write_kv(
        &mut self,
        (): (),
        rope: &Self::Rope,
        shape: HeadShape,
        norms: Option<(&Self::Vector, &Self::Vector, f32)>,
        qkv: &mut Self::Buffer,
        layer: usize,
        cache: &mut AsyncCache,
    ) -> Result<(), DeviceError> {
        let (step, rope) = (Arc::clone(&self.step), Arc::clone(rope));
        let norms = norms.map(|(query, key, epsilon)| (Arc::clone(query), Arc::clone(key), epsilon));
        let (qkv, cache) = (Arc::clone(qkv), Arc::clone(&cache.cache));
        self.enqueue(move |cpu| {
            let norms = norms.as_ref().map(|(query, key, epsilon)| (lock(query), lock(key), *epsilon));
            let norms = norms.as_ref().map(|(query, key, epsilon)| (&**query, &**key, *epsilon));
            let (step, rope) = (lock(&step), lock(&rope));
            cpu.rope_write_kv(&step, &rope, shape, norms, &mut lock(&qkv), layer, &mut lock(&cache))
        })
    }

    fn attention(
        &mut self,
        reader: &Self::Matrix,
        (): (),
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &AsyncCache,
        qkv: &mut Self::Buffer,
        scratch: &mut Self::Scratch,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError> {
        let reader = Arc::clone(reader);
        let (step, cache, qkv) = (Arc::clone(&self.step), Arc::clone(&cache.cache), Arc::clone(qkv));
        let (scratch, out) = (Arc::clone(scratch), Arc::clone(out));
        self.enqueue(move |cpu| {
            let (reader, step, cache) = (lock(&reader), lock(&step), lock(&cache));
            let (mut qkv, mut scratch, mut out) = (lock(&qkv), lock(&scratch), lock(&out));
            cpu.attention(&reader, &step, shape, params, layer, &cache, &mut qkv, &mut scratch, &mut out)
        })
    }

    fn silu_mul(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        width: usize,
        gate_up: &Self::Buffer,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError> {
        let (reader, gate_up, out) = (Arc::clone(reader), Arc::clone(gate_up), Arc::clone(out));
        self.enqueue(move |cpu| cpu.silu_mul(&lock(&reader), rows, width, &lock(&gate_up), &mut lock(&out)))
    }

    fn gather(
        &mut self,
        (): (),
        width: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        let (step, x, out) = (Arc::clone(&self.step), Arc::clone(x), Arc::clone(out));
        self.enqueue(move |cpu| cpu.gather(&lock(&step), width, &lock(&x), &mut lock(&out)))
    }

    fn gather_operand(
        &mut self,
        reader: &Self::Matrix,
        (): (),
        x: &Self::Operand,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError> {
        let (reader, step) = (Arc::clone(reader), Arc::clone(&self.step));
        let (x, out) = (Arc::clone(x), Arc::clone(out));
        self.enqueue(move |cpu| cpu.gather_operand(&lock(&reader), &lock(&step), &lock(&x), &mut lock(&out)))
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

    fn download(&mut self, x: &Self::Buffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let x = Arc::clone(x);
        self.idle()?.download(&lock(&x), start, out)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        let (answer, complete) = bounded(1);
        self.submit(Job::Barrier(answer));
        complete.recv().unwrap();
        lock(&self.error).take().map_or(Ok(()), Err)
    }
}
