//! Decoding does not allocate. The only test of its process, because it counts the allocations of the process.

#![cfg(not(feature = "loom"))]
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use penstock_engine::testing::BlockHasher;
use penstock_engine::testing::EngineCore;
use penstock_engine::testing::SharedStats;
use penstock_engine::testing::{CancelSet, Gate};
use penstock_engine::testing::{Message, Outbox, Start};
use penstock_engine::testing::{Reader, result_queue};
use penstock_engine::{Event, Limits, Port, Request, RequestId, RowOutput, StepDone};
use penstock_types::Sampling;
use penstock_types::Token;

struct Counting;

static NUM_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory it hands out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's obligations are passed on as they are.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Completes the next step: each stream repeats one token. Returns the number of tokens.
fn step(core: &mut EngineCore, readers: &mut [Reader], now: Instant) -> usize {
    let (plan, mut output) = core.plan(now).unwrap();
    for (index, row) in plan.rows.iter().enumerate() {
        let token_id = index as u32 % 8;
        let drafts = &plan.tokens[(row.tokens.end - row.num_drafts) as usize..row.tokens.end as usize];
        let num_accepted = drafts.iter().take_while(|draft| **draft == token_id).count() as u32;
        let num_tokens = if row.sample.is_some() { num_accepted + 1 } else { 0 };
        output.sampled.extend((0..num_tokens).map(|_| Token::new(token_id, 0.0)));
        output.rows.push(RowOutput { num_tokens, ..RowOutput::default() });
    }
    core.handle(Message::StepDone(StepDone { plan, output, result: Ok(()) }), now);
    core.ring();
    let tokens = readers.iter_mut().flat_map(|reader| std::iter::from_fn(|| reader.pop()));
    tokens.filter(|event| matches!(event, Event::Token(_))).count()
}

/// Runs streams that draft up to `num_speculative_tokens` tokens. Returns the allocations and the tokens of the last
/// 200 steps.
fn run(num_streams: usize, num_speculative_tokens: usize) -> (usize, usize) {
    let limits = Limits {
        max_model_len: 8192,
        max_num_seqs: num_streams,
        max_num_batched_tokens: 2048,
        max_waiting: 0,
        max_paused: 1,
        block_size: 16,
        num_blocks: 32768,
        vocabulary_size: 8,
        queue_capacity: 16,
        prefix_cache_ttl: Some(Duration::from_secs(300)),
        num_speculative_tokens,
        ..Limits::small()
    };
    let (port, now) = (Port::with_descriptor().unwrap(), Instant::now());
    let shared_stats = Arc::new(SharedStats::default());
    let (cancel_set, gate) = (Arc::new(CancelSet::default()), Arc::new(Gate::default()));
    let mut core = EngineCore::new(limits, BlockHasher::new(1), cancel_set, gate, Arc::clone(&shared_stats));
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let request = Arc::new(Request::new([1; 8], 8000, sampling));
    let mut readers: Vec<Reader> = (0..num_streams as u64)
        .map(|id| {
            let (writer, reader) = result_queue(16);
            let (id, request) = (RequestId(id), Arc::clone(&request));
            let start = Start { id, request, outboxes: vec![Outbox::new(id, writer, port.bell())] };
            core.handle(Message::Start(start), now);
            reader
        })
        .collect();
    // Until the buffers have grown, those of the outputs beyond what 200 steps add.
    let mut num_before = 0;
    while num_before < 2100 * num_streams {
        num_before += step(&mut core, &mut readers, now);
    }
    let before = NUM_ALLOCATIONS.load(Ordering::Relaxed);
    let num_tokens: usize = (0..200).map(|_| step(&mut core, &mut readers, now)).sum();
    let num_allocations = NUM_ALLOCATIONS.load(Ordering::Relaxed) - before;
    core.handle(Message::Shutdown, now);
    assert!(shared_stats.read().blocks_cached > 0, "blocks were published");
    (num_allocations, num_tokens)
}

#[test]
fn decoding_does_not_allocate_with_or_without_drafts() {
    assert_eq!(run(64, 0), (0, 64 * 200));
    assert_eq!(run(2, 8), (0, 2 * 200 * 9));
}
