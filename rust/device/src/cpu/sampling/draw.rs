//! The draw: the inverse of the cumulative distribution, over the kept ids in ascending order.

use super::kept::Kept;

/// The id at which the running sum of weights passes `uniform` times their total.
pub(super) fn draw(kept: &Kept<'_>, uniform: f64) -> u32 {
    let mut left = uniform * kept.total();
    let mut last = 0;
    for (span, sum) in kept.sums() {
        last = span;
        if left >= sum {
            left -= sum;
            continue;
        }
        for (id, weight) in kept.ids(span) {
            left -= weight;
            if left < 0.0 {
                return id as u32;
            }
        }
    }
    // Roundings left something over.
    let (id, _) = kept.ids(last).last().expect("a span that is not out has ids; this is a bug");
    id as u32
}
