//! The structures of `cuda/sample.cuh`, and the division of the device's memory among their arrays.

use std::mem::size_of;

use bytemuck::{NoUninit, Pod, Zeroable};
use penstock_cuda::{DevicePointer, Parameter};

use super::entry::{Entry, flags};
use crate::seam::StepSpec;

/// In an entry, there is no such value.
pub(super) const NONE: u32 = u32::MAX;
/// Ids of a tile, of a warp (a warp tile) and of a block, in the kernels that divide a row.
const TILE: usize = 128;
const WARP_IDS: usize = 4 * TILE;
pub(super) const BLOCK_IDS: usize = 8 * WARP_IDS;
/// Biases of a request, and ids of its bad sequences; the engine has the same limit.
pub(super) const MOST_LISTED: usize = 1024;
/// Entries of a launch. Larger batches are divided.
const MOST_ENTRIES: usize = 256;
/// Most likely ids of an entry, for which the results of every launch have room.
const USUAL_TOP: usize = 32;
/// Rows of processed logits in a launch.
const MOST_PROCESSED: usize = 4;
const ALIGNMENT: usize = 256;

impl Entry {
    pub fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }

    /// Whether its token is drawn from the weights.
    pub fn is_drawn(&self) -> bool {
        self.given == NONE && !self.has(flags::IS_GREEDY)
    }
}

/// `Result`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct RawResult {
    pub sum: f64,
    pub token: u32,
    pub outcome: u32,
    pub score: f32,
    pub best: f32,
    pub num_top: u32,
    reserved: u32,
}

pub(super) const IS_TOKEN: u32 = 0;
pub(super) const NO_CANDIDATES: u32 = 1;

/// `Top`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Top {
    pub id: u32,
    pub score: f32,
}

/// `Bias`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Bias {
    pub id: u32,
    pub value: f32,
}

/// `Slots`.
#[repr(C)]
#[derive(Clone, Copy, Debug, NoUninit)]
pub(super) struct SlotArrays {
    pub last_tokens: DevicePointer,
    lengths: DevicePointer,
    generated: DevicePointer,
    allowed: DevicePointer,
    stops: DevicePointer,
    biases: DevicePointer,
    sequences: DevicePointer,
    history: DevicePointer,
    counts: DevicePointer,
    vocabulary: i32,
    words: i32,
    list: i32,
    positions: i32,
}

/// `Batch`.
#[repr(C)]
#[derive(Clone, Copy, Debug, NoUninit)]
pub(super) struct BatchArrays {
    pub entries: DevicePointer,
    pub logits: DevicePointer,
    pub masks: DevicePointer,
    /// The scores: processed logits lie where the scores of their entry are.
    processed: DevicePointer,
    pub scores: DevicePointer,
    highest: DevicePointer,
    highest_logits: DevicePointer,
    sums: DevicePointer,
    sums_of_exp: DevicePointer,
    masses: DevicePointer,
    bounds: DevicePointer,
    pub results: DevicePointer,
    pub tops: DevicePointer,
    pub slots: SlotArrays,
}

/// `Admission` of `cuda/sample_slots.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, NoUninit)]
pub(super) struct Admission {
    pub slot: u32,
    pub last_token: u32,
    pub length: u32,
    pub generated: u32,
    pub is_counted: u32,
}

// SAFETY: the types are those of `sample.cuh` and `sample_slots.cu`.
unsafe impl Parameter for SlotArrays {}
// SAFETY: as above.
unsafe impl Parameter for BatchArrays {}
// SAFETY: as above.
unsafe impl Parameter for Admission {}

/// The sizes of the arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub slots: usize,
    pub vocabulary: usize,
    /// Tokens of the longest sequence.
    pub positions: usize,
    /// Entries of a launch.
    pub entries: usize,
    /// Words of a bitmap.
    pub words: usize,
    /// Most likely ids of a launch.
    pub tops: usize,
}

impl Sizes {
    pub fn new(spec: &StepSpec) -> Self {
        let entries = spec.logits_rows.clamp(1, MOST_ENTRIES);
        Self {
            slots: spec.sequences,
            vocabulary: spec.vocabulary,
            positions: spec.positions,
            entries,
            words: spec.vocabulary.div_ceil(32),
            tops: spec.vocabulary.max(entries * USUAL_TOP),
        }
    }

    /// Bytes of the inputs of a launch: entries, then bitmaps.
    pub fn input_bytes(&self) -> usize {
        self.entries * (size_of::<Entry>() + self.words * size_of::<u32>())
    }

    /// Rows of processed logits of a launch.
    pub fn most_processed(&self) -> usize {
        self.entries.min(MOST_PROCESSED)
    }

    /// Bytes of the processed logits of a launch.
    pub fn processed_bytes(&self) -> usize {
        self.most_processed().saturating_mul(self.row_bytes())
    }

    pub fn row_bytes(&self) -> usize {
        self.vocabulary * size_of::<f32>()
    }

    /// Bytes of the results of a launch: those of the entries, then the most likely ids.
    pub fn result_bytes(&self) -> usize {
        self.entries * size_of::<RawResult>() + self.tops * size_of::<Top>()
    }

    pub fn sequence_words(&self) -> usize {
        2 * MOST_LISTED + 1
    }

    /// Bytes of all lists of a request.
    pub fn admission_bytes(&self) -> usize {
        let words = 2 * self.words + self.sequence_words() + self.positions;
        words * size_of::<u32>() + MOST_LISTED * size_of::<Bias>()
    }

    /// Blocks of a row.
    pub fn row_blocks(&self) -> usize {
        self.vocabulary.div_ceil(BLOCK_IDS)
    }

    /// Divides memory that begins at `base`; returns the bytes of all arrays, too.
    pub fn divide(&self, base: DevicePointer) -> (BatchArrays, usize) {
        let mut end = 0;
        let mut array = |count: usize, bytes: usize| {
            let start = end;
            end += (count * bytes).next_multiple_of(ALIGNMENT);
            base.offset(start)
        };
        let (slots, entries, word) = (self.slots, self.entries, size_of::<u32>());
        let (tiles, warp_tiles) = (self.vocabulary.div_ceil(TILE), self.vocabulary.div_ceil(WARP_IDS));
        let slots = SlotArrays {
            last_tokens: array(slots, word),
            lengths: array(slots, word),
            generated: array(slots, word),
            allowed: array(slots * self.words, word),
            stops: array(slots * self.words, word),
            biases: array(slots * MOST_LISTED, size_of::<Bias>()),
            sequences: array(slots * self.sequence_words(), word),
            history: array(slots * self.positions, word),
            counts: array(slots * self.vocabulary, word),
            vocabulary: self.vocabulary as i32,
            words: self.words as i32,
            list: MOST_LISTED as i32,
            positions: self.positions as i32,
        };
        let inputs = array(1, self.input_bytes());
        let scores = array(entries * self.vocabulary, size_of::<f32>());
        let results = array(1, self.result_bytes());
        let batch = BatchArrays {
            entries: inputs,
            logits: DevicePointer::NULL,
            masks: inputs,
            processed: scores,
            scores,
            highest: array(entries * tiles, size_of::<f32>()),
            highest_logits: array(entries * tiles, size_of::<f32>()),
            sums: array(entries * tiles, size_of::<f32>()),
            sums_of_exp: array(entries * warp_tiles, size_of::<f32>()),
            masses: array(entries * tiles, size_of::<u64>()),
            bounds: array(entries, 2 * word),
            results,
            tops: results,
            slots,
        };
        (batch, end)
    }
}

impl SlotArrays {
    /// The lists of a slot, by their addresses.
    pub fn allowed(&self, slot: usize) -> DevicePointer {
        self.allowed.offset(slot * self.words as usize * size_of::<u32>())
    }

    pub fn stops(&self, slot: usize) -> DevicePointer {
        self.stops.offset(slot * self.words as usize * size_of::<u32>())
    }

    pub fn biases(&self, slot: usize) -> DevicePointer {
        self.biases.offset(slot * MOST_LISTED * size_of::<Bias>())
    }

    pub fn sequences(&self, slot: usize) -> DevicePointer {
        self.sequences.offset(slot * (2 * MOST_LISTED + 1) * size_of::<u32>())
    }

    pub fn history(&self, slot: usize) -> DevicePointer {
        self.history.offset(slot * self.positions as usize * size_of::<u32>())
    }
}
