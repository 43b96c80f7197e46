//! After the warm-up nothing grows. The only test of its process, because it counts the bytes of the process.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "this test uses a part")]
#[path = "all/common/mod.rs"]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};

use common::{LONGEST, TinyModel, request, run};
use penstock_engine::Port;
use penstock_runner::MemoryInfo;
use penstock_types::EngineConfig;

struct Counting;

static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);

// SAFETY: every call is forwarded to the system's allocator unchanged; counting does not access the allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's obligations are forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const STREAMS: usize = 8;
const MAX_TOKENS: usize = 8;
/// A multiple of a page.
const ADAPTER_BYTES: u64 = 1 << 16;
/// Less than the size of one request, of which there are a thousand.
const SLACK: isize = 1 << 10;

#[test]
fn requests_at_the_limits_allocate_no_more_than_the_warm_up() {
    let model = TinyModel::write();
    let config = EngineConfig {
        threads: Some(2),
        max_num_seqs: Some(STREAMS),
        max_num_batched_tokens: Some(64),
        max_adapters: 2,
        adapter_cache_bytes: Some(ADAPTER_BYTES),
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let (engine, info) = model.launch(&config).unwrap();
    // The arena is completely allocated, so a further allocation would fail. Adapters are not in it; none is loaded.
    let MemoryInfo { limit, weights, workspace, inputs, kv_cache, host_cache, adapters, peak } = info.memory;
    assert_eq!(peak, weights + workspace + kv_cache + host_cache + adapters - ADAPTER_BYTES);
    assert!(peak + ADAPTER_BYTES + inputs <= limit && info.warm_up_seconds > 0.0, "{info:?}");

    let port = Port::with_condvar();
    let mut number = 0;
    let mut batch = || {
        let requests = number..number + STREAMS;
        number = requests.end;
        let requests = requests.map(|number| request(number, LONGEST - MAX_TOKENS, MAX_TOKENS));
        assert_eq!(run(&engine, &port, requests), STREAMS * MAX_TOKENS);
        while engine.stats().running > 0 {
            std::thread::yield_now();
        }
        LIVE_BYTES.load(Ordering::Relaxed)
    };
    // The first ones bring the scheduler's own lists to their size.
    let before = (0..25).map(|_| batch()).max().unwrap();
    let after = (0..125).map(|_| batch()).max().unwrap();
    assert!(after <= before + SLACK, "{before} bytes before a thousand requests, {after} after");
}
