//! The random draw: the inverse of the cumulative distribution, over the candidates in ascending order.

use super::candidates::Candidates;

/// The id at which the running sum of weights exceeds `uniform` times their total.
pub(super) fn sample(candidates: &Candidates<'_>, uniform: f64) -> u32 {
    let mut remaining = uniform * candidates.total();
    let mut last = 0;
    for (tile, sum) in candidates.sums() {
        last = tile;
        if remaining >= sum {
            remaining -= sum;
            continue;
        }
        for (id, weight) in candidates.ids(tile) {
            remaining -= weight;
            if remaining < 0.0 {
                return id as u32;
            }
        }
    }
    // Rounding left a remainder: the last candidate.
    let (id, _) = candidates.ids(last).last().expect("a tile with a sum has candidates; this is a bug");
    id as u32
}
