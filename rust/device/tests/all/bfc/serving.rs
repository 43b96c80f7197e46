//! Serving workloads with fixed seeds: weights, one KV region and workspaces at the start, then thousands of adapters
//! that are loaded and evicted and images that are allocated and freed.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use penstock_device::bfc::{AllocationId, Bfc, DEFAULT_ALIGNMENT, Placement};

const LAYERS: usize = 32;
const HIDDEN: usize = 4096;
const KV_HEADS_WIDTH: usize = 1024;
const QKV_WIDTH: usize = HIDDEN + 2 * KV_HEADS_WIDTH;
const MLP_WIDTH: usize = 14_336;
const VOCABULARY: usize = 128_256;
const MOST_ADAPTERS: usize = 12;
const MOST_IMAGES: usize = 12;
const NUM_EVENTS: usize = 4_000;
const SEEDS: RangeInclusive<u64> = 1..=6;
/// The size of the model, its cache and the workspaces, rounded up.
const RESIDENT: usize = 40 << 30;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// An allocator under a workload, and its recorded statistics.
struct Server {
    bfc: Bfc,
    random: Random,
    /// The placement of short-lived blocks.
    short_lived: Placement,
    offsets: Vec<usize>,
    peaks: Vec<usize>,
    fragmentation: Vec<f64>,
}

impl Server {
    /// Runs the workload on a region of `room` bytes in addition to the resident blocks.
    fn serve(room: usize, seed: u64, short_lived: Placement) -> Self {
        let bfc = Bfc::new(RESIDENT + room, DEFAULT_ALIGNMENT).expect("a valid size");
        let (offsets, peaks, fragmentation) = Default::default();
        let mut server = Self { bfc, random: Random(seed), short_lived, offsets, peaks, fragmentation };
        server.start();
        server.bfc.check_integrity();
        server.run();
        server.bfc.check_integrity();
        server
    }

    /// Allocates an 8B model in bf16, a KV cache of 24 GiB, and the workspace of a step.
    fn start(&mut self) {
        let mlp = [HIDDEN * 2 * MLP_WIDTH, MLP_WIDTH * HIDDEN];
        for _ in 0..LAYERS {
            for values in [HIDDEN * QKV_WIDTH, HIDDEN * HIDDEN, mlp[0], mlp[1], HIDDEN, HIDDEN] {
                self.allocate(2 * values, Placement::Low, "weights");
            }
        }
        for _ in ["embedding", "head"] {
            self.allocate(2 * VOCABULARY * HIDDEN, Placement::Low, "weights");
        }
        self.allocate(24 << 30, Placement::Low, "KV cache");
        for tokens in [1, 8, 64, 512, 2048] {
            for width in [HIDDEN, QKV_WIDTH, 2 * MLP_WIDTH] {
                self.allocate(4 * tokens * width, self.short_lived, "workspace");
            }
        }
        self.allocate(4 * 256 * VOCABULARY, self.short_lived, "logits");
        assert!((RESIDENT - (1 << 30)..=RESIDENT).contains(&self.bfc.stats().in_use));
    }

    fn run(&mut self) {
        let (mut adapters, mut images) = (VecDeque::new(), Vec::new());
        for _ in 0..NUM_EVENTS {
            match self.random.below(10) {
                0 => {
                    if adapters.len() == MOST_ADAPTERS {
                        let least_used = self.random.below(4);
                        self.free(adapters.remove(least_used).expect("all are loaded"));
                    }
                    adapters.push_back(self.load_adapter());
                }
                1..=4 if images.len() < MOST_IMAGES => images.push(self.load_image()),
                _ if !images.is_empty() => {
                    let done = self.random.below(images.len());
                    self.free(images.swap_remove(done));
                }
                _ => {}
            }
        }
    }

    /// A low-rank pair for each of the four attention matrices of each layer.
    fn load_adapter(&mut self) -> Vec<AllocationId> {
        let rank = 8 << self.random.below(4);
        let sides = [HIDDEN, HIDDEN, HIDDEN, KV_HEADS_WIDTH, HIDDEN, KV_HEADS_WIDTH, HIDDEN, HIDDEN];
        let sides = sides.repeat(LAYERS).into_iter();
        sides.map(|side| self.allocate(2 * rank * side, Placement::Low, "adapter")).collect()
    }

    /// Pixels, patches, the tower's widest activation and the embeddings of an image of any shape.
    fn load_image(&mut self) -> Vec<AllocationId> {
        let patches = (8 + self.random.below(64)) * (8 + self.random.below(64));
        let sizes =
            [patches * 14 * 14 * 3 * 4, patches * 1280 * 4, patches * 5120 * 4, patches / 4 * HIDDEN * 2];
        sizes.map(|bytes| self.allocate(bytes, self.short_lived, "image")).to_vec()
    }

    fn allocate(&mut self, bytes: usize, placement: Placement, name: &'static str) -> AllocationId {
        let block = self.bfc.allocate(bytes, placement, name).unwrap_or_else(|error| panic!("{error}"));
        self.offsets.push(block.offset);
        self.record();
        block.id
    }

    fn free(&mut self, blocks: Vec<AllocationId>) {
        for id in blocks {
            self.bfc.free(id).expect("a live block");
            self.record();
        }
    }

    fn record(&mut self) {
        let stats = self.bfc.stats();
        assert!(stats.peak >= stats.in_use, "{stats:?}");
        self.peaks.push(stats.peak);
        self.fragmentation.push(stats.fragmentation());
    }

    fn mean_fragmentation(&self) -> f64 {
        self.fragmentation.iter().sum::<f64>() / self.fragmentation.len() as f64
    }
}

#[test]
fn serving_leaves_the_free_memory_contiguous() {
    for seed in SEEDS {
        let server = Server::serve(6 << 30, seed, Placement::High);
        let (stats, mean) = (server.bfc.stats(), server.mean_fragmentation());
        println!("seed {seed}: {:.3} at the end, {mean:.3} on average; {stats:?}", stats.fragmentation());
        assert!(stats.fragmentation() < 0.1 && mean < 0.05, "{mean}: {stats:?}");
        assert!(stats.num_live > 2_000 && stats.peak > stats.in_use && server.peaks.is_sorted(), "{stats:?}");
    }
}

#[test]
fn serving_fits_with_a_fifth_of_slack() {
    for seed in SEEDS {
        let roomy = Server::serve(6 << 30, seed, Placement::High);
        let needed = roomy.bfc.stats().peak - RESIDENT;
        let tight = Server::serve(needed + needed / 5, seed, Placement::High);
        assert_eq!(tight.bfc.stats().peak, roomy.bfc.stats().peak);
    }
}

#[test]
fn two_placements_fragment_less_than_one() {
    for seed in SEEDS {
        let [two, one] =
            [Placement::High, Placement::Low].map(|placement| Server::serve(6 << 30, seed, placement));
        assert!(
            two.mean_fragmentation() < 0.75 * one.mean_fragmentation(),
            "{} {}",
            two.mean_fragmentation(),
            one.mean_fragmentation()
        );
    }
}

#[test]
fn two_runs_of_a_workload_have_the_same_offsets() {
    let [one, other] = [(); 2].map(|()| Server::serve(6 << 30, 1, Placement::High));
    assert_eq!(one.offsets, other.offsets);
}
