// The data of sampling, and its arithmetic on single ids.
//
// A batch has entries; an entry is a row of logits, from which a token is sampled, or of which the log probability of
// a given token is computed. The steps and their order are those of rust/device/src/sample.rs. The ids of a row lie in
// tiles of 128: the highest score of a tile says whether a filter has to read the tile, and the sums of the weights of
// the tiles say in which one a draw lies.
//
// The weights and the sums of tiles have the bits of the CPU backend with fused multiply-adds; so these functions use
// operations that are rounded one by one. Sums of tiles are added in float64, in a fixed order that is not the CPU's.
// The masses of radix selects are sums of integers, in units of 2^-45, by atomics: their order does not matter.
#pragma once
#include "common.cuh"

constexpr uint32_t NONE = 0xffffffffu;
constexpr int TILE = 128;                               // ids
constexpr int WARP_IDS = 4 * TILE;                      // of a warp in kernels of many blocks for a row: a warp tile
constexpr int ROW_THREADS = 256;                        // of those kernels
constexpr int BLOCK_IDS = ROW_THREADS / 32 * WARP_IDS;  // and the ids of a block

// begin generated: Entry
enum : uint32_t {
    // The scores are not the logits: they are in `Batch::scores`.
    IS_PROCESSED = 1,
    // The most likely id has all the probability.
    IS_GREEDY = 2,
    // The slot has a bitmap of the ids that can be sampled.
    HAS_ALLOWED = 4,
    // The slot has a bitmap of the ids that end the request.
    HAS_STOPS = 8,
    // The ids that end the request are masked.
    IS_SUPPRESSED = 16,
    // The slot counts its tokens: a penalty is set.
    IS_COUNTED = 32,
    // The slot keeps its tokens.
    IS_RECORDED = 64,
    // The repetition penalty applies to the tokens of the prompt.
    COUNTS_PROMPT = 128,
    // Log probabilities are returned.
    HAS_LOGPROBS = 256,
    // The returned log probabilities are those of the logits.
    HAS_RAW_LOGPROBS = 512,
};

// A row of logits from which a token is sampled, or of which the log probability of a token is computed.
struct Entry {
    // Random seed of the request.
    uint64_t seed;
    // Index of the row of logits.
    uint32_t row;
    // Slot of the sequence.
    uint32_t slot;
    // Position of the token in the output.
    uint32_t index;
    // Draft token that is verified; `NONE` without one.
    uint32_t draft;
    // Token whose log probability is computed; `NONE` if a token is sampled.
    uint32_t given;
    // Index of the mask of a grammar; `NONE` without one.
    uint32_t mask;
    // Index of the row of processed logits; `NONE` without one.
    uint32_t processed;
    // Number of the entries before this one that belong to the same slot.
    uint32_t position;
    // Number of the entries of the slot in its first entry; 0 in the others.
    uint32_t length;
    // Sum of flags.
    uint32_t flags;
    // Factor of the scores: 1 / temperature.
    float factor;
    // Sample among tokens whose logit is at most this many standard deviations below the highest one.
    float top_n_sigma;
    // Sample among this many most likely tokens; 0 and -1 disable the filter.
    uint32_t top_k;
    // Sample among the fewest most likely tokens whose probabilities sum to at least this.
    float top_p;
    // Sample among tokens whose probability is at least this fraction of the highest one.
    float min_p;
    // Sample among the most typical tokens whose probabilities sum to at least this.
    float typical_p;
    // Minimum probability of a sampled token.
    float epsilon_cutoff;
    // Divisor of the positive logits, and factor of the negative ones, of tokens that occurred before.
    float repetition_penalty;
    // Value subtracted from the logits of tokens once per occurrence in the output.
    float frequency_penalty;
    // Value subtracted from the logits of tokens that occur in the output.
    float presence_penalty;
    // Length of the token n-grams that occur at most once in prompt and output; 0 disables the rule.
    uint32_t no_repeat_ngram_size;
    // Number of the biases of the slot.
    uint32_t num_biases;
    // Number of the bad sequences of the slot.
    uint32_t num_sequences;
    // Number of the most likely ids that are returned.
    uint32_t num_top;
    // Index of the first of them in `Batch::tops`.
    uint32_t first_top;
    // 0: without it the structure would have padding.
    uint32_t reserved;
};
// end generated: Entry

enum : uint32_t { IS_TOKEN = 0, NO_CANDIDATES = 1, IS_REJECTED = 2 };

// The log probability of an id with a score is (score - best) * factor - log(sum).
struct Result {
    double sum;
    uint32_t token, outcome;
    float score, best;  // of the distribution of log probabilities: of the token, and the highest
    uint32_t num_top, reserved;
};
struct Top {
    uint32_t id;
    float score;
};

struct Bias {
    uint32_t id;
    float value;
};

// In counts, the token is in the prompt; the other bits count how often it was generated.
constexpr uint32_t IN_PROMPT = 1u << 31;

// The state of all slots: arrays with the values of a slot one behind the other.
struct Slots {
    uint32_t* last_tokens;  // [slots]: sampled last, or the prompt's last
    uint32_t* lengths;      // [slots]: of history
    uint32_t* generated;    // [slots]: the number of generated tokens
    uint32_t* allowed;      // [slots][words]: bitmaps
    uint32_t* stops;        // [slots][words]
    Bias* biases;           // [slots][list]: ascending ids
    uint32_t* sequences;    // [slots][2 list + 1]: the ends of the sequences, preceded by 0, then their ids
    uint32_t* history;      // [slots][positions]
    uint32_t* counts;       // [slots][vocabulary]
    int vocabulary, words, list, positions;
};

// The lowest score that top_n_sigma keeps, and the highest rank among the tiles that have a candidate.
struct Bounds {
    float floor;
    uint32_t rank;
};

// The arguments of the kernels of a batch. Arrays of an entry have `tiles` elements; `sums_of_exp` has one for a warp
// tile.
struct Batch {
    const Entry* entries;
    const float* logits;        // [rows][vocabulary]
    const uint32_t* masks;      // [masks][words]
    const float* processed;     // [processed][vocabulary]
    float* scores;              // [entries][vocabulary]
    float* highest;             // [entries][tiles]: of the scores
    float* highest_logits;      // [entries][tiles]: of the logits, if log probabilities need them and they differ
    float* sums;                // [entries][tiles]: of the weights
    float* sums_of_exp;         // [entries][warp tiles]: of the distribution of log probabilities
    uint64_t* masses;           // [entries][tiles]: of ids of equal rank
    Bounds* bounds;             // [entries]
    Result* results;            // [entries]
    Top* tops;
    Slots slots;
};

// A row of scores with the highest score of each tile.
struct Row {
    const float* scores;
    const float* highest;
    int vocabulary, tiles;
};

DEVICE bool has_own_logits(const Entry& entry) {
    return entry.flags & HAS_RAW_LOGPROBS && (entry.flags & IS_PROCESSED || entry.processed != NONE);
}

DEVICE Row logits_row(const Batch& batch, const Entry& entry, int number) {
    const int vocabulary = batch.slots.vocabulary, tiles = ceil_div(vocabulary, TILE);
    const float* highest = has_own_logits(entry) ? batch.highest_logits : batch.highest;
    return {batch.logits + size_t(entry.row) * vocabulary, highest + size_t(number) * tiles, vocabulary, tiles};
}

// The row from which the token is sampled.
DEVICE Row scores_row(const Batch& batch, const Entry& entry, int number) {
    const int vocabulary = batch.slots.vocabulary, tiles = ceil_div(vocabulary, TILE);
    const float* scores = batch.logits + size_t(entry.row) * vocabulary;
    if (entry.processed != NONE) scores = batch.processed + size_t(entry.processed) * vocabulary;
    if (entry.flags & IS_PROCESSED) scores = batch.scores + size_t(number) * vocabulary;
    return {scores, batch.highest + size_t(number) * tiles, vocabulary, tiles};
}

// The row of the log probabilities.
DEVICE Row logprobs_row(const Batch& batch, const Entry& entry, int number) {
    return entry.flags & HAS_RAW_LOGPROBS ? logits_row(batch, entry, number) : scores_row(batch, entry, number);
}
DEVICE float logprobs_factor(const Entry& entry) { return entry.flags & HAS_RAW_LOGPROBS ? 1 : entry.factor; }

// ---- Scores

DEVICE bool is_finite(float x) { return fabsf(x) < infinity(); }

// The larger one; NaN counts as minus infinity.
DEVICE float larger(float x, float best) { return x > best ? x : best; }

// Lower for higher scores, the same for equal ones, and the highest for NaN.
DEVICE uint32_t rank_of(float score) {
    if (score != score) return NONE;
    const uint32_t bits = __float_as_uint(score == 0 ? 0 : score);
    return bits >> 31 ? bits : 0x7fffffffu - bits;
}

DEVICE float log_weight(float score, float best, float factor) {
    return __fmul_rn(__fadd_rn(score, -best), factor);
}

// exp(factor * (score - best)), 0 for NaN; the polynomial of rust/kernels/src/generic/math.rs.
DEVICE float weight_of(float score, float best, float factor) {
    const float x = larger(log_weight(score, best, factor), -105);
    const float n = rintf(__fmul_rn(x, 1.44269504f));
    const float r = __fmaf_rn(-n, -2.12194440e-4f, __fmaf_rn(-n, 0.693359375f, x));
    float p = 0.001381432f;
    p = __fmaf_rn(p, r, 0.008368851f);
    p = __fmaf_rn(p, r, 0.0416684f);
    p = __fmaf_rn(p, r, 0.1666652f);
    p = __fmaf_rn(p, r, 0.49999994f);
    p = __fmaf_rn(p, r, 1);
    p = __fmaf_rn(p, r, 1);
    const float weight = __fmul_rn(p, __uint_as_float(uint32_t(int(larger(n, -127)) + 127) << 23));
    return weight < 1.17549435e-38f ? 0 : weight;
}

// ---- Sums of tiles: 16 chains, then butterflies. A lane has the ids lane, lane + 32, lane + 64 and lane + 96.

// Adds a tile to the chains. Lanes n and n + 16 have the same chain.
DEVICE void add_tile(float& chain, const float (&weights)[4]) {
    const bool is_upper = threadIdx.x & 16;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const float other = __shfl_xor_sync(ALL_LANES, weights[part], 16);
        chain = __fadd_rn(chain, is_upper ? other : weights[part]);
        chain = __fadd_rn(chain, is_upper ? weights[part] : other);
    }
}
DEVICE float sum_of_chains(float chain) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) chain = __fadd_rn(chain, __shfl_xor_sync(ALL_LANES, chain, step));
    return chain;
}

// The highest score of all tiles, in a block of whole warps. `partial` has an element per warp, and is not used
// before the next barrier.
DEVICE float highest_of(const float* highest, int tiles, float* partial) {
    float best = -infinity();
    for (int tile = threadIdx.x; tile < tiles; tile += blockDim.x) best = larger(highest[tile], best);
    best = warp_max(best);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < int(blockDim.x) / 32; warp++) best = larger(partial[warp], best);
    return best;
}
