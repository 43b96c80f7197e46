//! The time of an allocator operation: with ten thousand live blocks, repeatedly frees a random one and allocates a random size.
//! `cargo bench --bench bfc`; prints the median over batches.

use std::time::Instant;

use penstock_device::bfc::{Bfc, Block, DEFAULT_ALIGNMENT, Placement};

const NUM_LIVE: usize = 10_000;
const BATCHES: usize = 301;
/// Pairs of free and allocate per batch.
const PAIRS: usize = 2_000;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    fn placement(&mut self) -> Placement {
        if self.below(2) == 0 { Placement::Low } else { Placement::High }
    }
}

/// From 256 bytes to 1 MiB, every power of two with the same probability.
fn any_size(random: &mut Random) -> usize {
    let base = 256 << random.below(12);
    base + random.below(base)
}

/// Within one power of two, so that few bins have all free chunks.
fn one_power(random: &mut Random) -> usize {
    (256 << 10) + random.below(256 << 10)
}

fn measure(title: &str, size: fn(&mut Random) -> usize) {
    let mut random = Random(1);
    let mut bfc = Bfc::new(1 << 40, DEFAULT_ALIGNMENT).expect("a valid size");
    let allocate = |bfc: &mut Bfc, random: &mut Random| {
        bfc.allocate(size(random), random.placement(), "bench").expect("the region is large enough")
    };
    let mut live: Vec<Block> = (0..NUM_LIVE).map(|_| allocate(&mut bfc, &mut random)).collect();
    let mut replace = |num_pairs: usize| {
        let start = Instant::now();
        for _ in 0..num_pairs {
            let index = random.below(NUM_LIVE);
            bfc.free(live[index].id).expect("a live block");
            live[index] = allocate(&mut bfc, &mut random);
        }
        start.elapsed().as_nanos() as f64 / (2 * num_pairs) as f64
    };
    replace(30 * NUM_LIVE); // until the number of free chunks is stationary
    let mut times: Vec<f64> = (0..BATCHES).map(|_| replace(PAIRS)).collect();
    times.sort_by(f64::total_cmp);
    bfc.check_integrity();
    let stats = bfc.stats();
    println!(
        "{title:<16} {:>6.1} ns/op median {:>6.1} best   {} live, {} free chunks",
        times[BATCHES / 2],
        times[0],
        stats.num_live,
        stats.num_free_chunks,
    );
}

fn main() {
    measure("256 B to 1 MiB", any_size);
    measure("256 to 512 KiB", one_power);
}
