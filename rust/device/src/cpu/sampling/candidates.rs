//! The candidates: ids that may be sampled, with their weights.

use std::ops::RangeInclusive;

use penstock_kernels::Kernels;

use super::radix_select::Cutoff;
use super::tiles::{self, Tiles};

/// The ids of a row of scores that are left. A tile with sum 0 has no candidates, and its weights are undefined. In the
/// other tiles, an id that is no candidate has weight 0.
pub(super) struct Candidates<'a> {
    kernels: Kernels,
    tiles: Tiles<'a>,
    /// The factor on the scores.
    factor: f32,
    /// `exp(factor * (score - best))`, so 1 for the best.
    weights: &'a mut [f32],
    /// The sum of the weights of each tile.
    sums: &'a mut [f32],
}

impl<'a> Candidates<'a> {
    /// The ids of all tiles that have an id with a rank up to `last`.
    pub fn new(
        kernels: Kernels,
        tiles: Tiles<'a>,
        last: u32,
        factor: f32,
        weights: &'a mut [f32],
        sums: &'a mut [f32],
    ) -> Self {
        sums.fill(0.0);
        for tile in tiles.up_to(last) {
            let ids = tiles::ids(tile, weights.len());
            let (scores, weights) = (&tiles.scores[ids.clone()], &mut weights[ids]);
            sums[tile] = kernels.exp_weights(scores, tiles.best(), factor, weights);
        }
        Self { kernels, tiles, factor, weights, sums }
    }

    /// The scores from which the weights were computed.
    pub fn tiles(&self) -> &Tiles<'a> {
        &self.tiles
    }

    /// The factor on the scores.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// Log of the weight of an id with this score.
    pub fn log_weight(&self, score: f32) -> f32 {
        (score - self.tiles.best()) * self.factor
    }

    /// Number of ids, candidates or not.
    pub fn vocabulary(&self) -> usize {
        self.weights.len()
    }

    /// The sum of all weights.
    pub fn total(&self) -> f64 {
        self.sums.iter().map(|sum| f64::from(*sum)).sum()
    }

    /// The largest weight.
    pub fn heaviest(&self) -> f32 {
        let bits = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).max(); // see `filters::top_p`
        f32::from_bits(self.slices().filter_map(|(_, weights)| bits(weights)).max().unwrap_or(0))
    }

    /// The tiles that have candidates, each with the sum of its weights.
    pub fn sums(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        let sums = self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0);
        sums.map(|(tile, sum)| (tile, f64::from(*sum)))
    }

    /// The candidates of such a tile, each with its weight.
    pub fn ids(&self, tile: usize) -> impl Iterator<Item = (usize, f64)> + '_ {
        let ids = tiles::ids(tile, self.weights.len());
        let weights = self.weights[ids.clone()].iter().map(|weight| f64::from(*weight));
        ids.zip(weights).filter(|(_, weight)| *weight > 0.0)
    }

    /// Scores and weights of the tiles that have candidates.
    pub fn slices(&self) -> impl Iterator<Item = (&[f32], &[f32])> + '_ {
        let ids = self.sums().map(|(tile, _)| tiles::ids(tile, self.weights.len()));
        ids.map(|ids| (&self.tiles.scores[ids.clone()], &self.weights[ids]))
    }

    /// Removes the tiles in which no log weight reaches `floor`.
    pub fn cut_tiles_below(&mut self, floor: f32) {
        for tile in 0..self.sums.len() {
            if self.log_weight(self.tiles.highest()[tile]) < floor {
                self.sums[tile] = 0.0;
            }
        }
    }

    /// Removes the ids with a score below `floor`.
    pub fn cut_scores_below(&mut self, floor: f32) {
        for (tile, sum) in self.sums.iter_mut().enumerate().filter(|(_, sum)| **sum > 0.0) {
            let ids = tiles::ids(tile, self.weights.len());
            let (scores, weights) = (&self.tiles.scores[ids.clone()], &mut self.weights[ids]);
            for (score, weight) in scores.iter().zip(&mut *weights) {
                *weight = if *score < floor { 0.0 } else { *weight };
            }
            *sum = self.kernels.sum(weights);
        }
    }

    /// Removes the ids with a weight below `floor`.
    pub fn cut_below(&mut self, floor: f32) {
        for (tile, sum) in self.sums.iter_mut().enumerate().filter(|(_, sum)| **sum > 0.0) {
            let weights = &mut self.weights[tiles::ids(tile, self.tiles.scores.len())];
            for weight in &mut *weights {
                *weight = if *weight < floor { 0.0 } else { *weight };
            }
            *sum = self.kernels.sum(weights);
        }
    }

    /// Keeps the ids of the lowest ranks, the lowest ids first among equals, until their masses add up to `wanted`.
    /// `key(score, weight)` is an id's rank, none below `ranks`, and mass, 0 for ids that are no candidates. No id with
    /// a rank above `ranks` may be needed.
    pub fn keep_lowest_ranks(
        &mut self,
        ranks: RangeInclusive<u32>,
        wanted: f64,
        key: impl Fn(f32, f32) -> (u32, f32),
    ) {
        let mut cutoff = Cutoff::find(ranks, wanted, || self.slices(), &key);
        for (tile, sum) in self.sums.iter_mut().enumerate().filter(|(_, sum)| **sum > 0.0) {
            let ids = tiles::ids(tile, self.weights.len());
            let (scores, weights) = (&self.tiles.scores[ids.clone()], &mut self.weights[ids]);
            let mut num_at_cutoff = 0_u32;
            for (score, weight) in scores.iter().zip(&mut *weights) {
                let (rank, _) = key(*score, *weight);
                num_at_cutoff += u32::from(rank == cutoff.rank);
                *weight = if rank <= cutoff.rank { *weight } else { 0.0 };
            }
            if num_at_cutoff > 0 {
                for (score, weight) in scores.iter().zip(&mut *weights) {
                    let (rank, mass) = key(*score, *weight);
                    *weight = if cutoff.includes(rank, mass) { *weight } else { 0.0 };
                }
            }
            *sum = self.kernels.sum(weights);
        }
    }
}
