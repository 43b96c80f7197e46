// From logits to weights: the kernels of sampling that divide a row among many blocks.
//
//     sample_process   scores = logits + bias, with penalties; minus infinity where masked
//     sample_exclude   minus infinity for the ids that would complete a bad sequence or repeat an n-gram
//     sample_maxima    the highest score of each tile
//     sample_weights   the sum of the weights of each tile, and of each warp tile for log probabilities
//
// Data      See Batch in sample.cuh. A slot's tokens are its history and, for the entry at position n among those of
//           its slot, the drafts of the entries at positions 1 to n: it is sampled only if they are right.
// Shape     grid (blocks, entries). A thread of sample_exclude compares the last tokens with those before one token;
//           a block of the others takes 4096 ids, of which a warp takes 512 (a warp tile, 4 tiles).
// Limit     bytes: 4 per id in sample_maxima, again in sample_weights (not for greedy rows), 8 to 16 in
//           sample_process (not for rows without any of its parameters).
#include "sample.cuh"

DEVICE bool is_set(const uint32_t* bitmap, uint32_t id) { return bitmap[id / 32] >> id % 32 & 1; }

DEVICE float penalised(const Batch& batch, const Entry& entry, int number, int id, float x) {
    const uint32_t counts = batch.slots.counts[size_t(entry.slot) * batch.slots.vocabulary + id];
    uint32_t generated = counts & ~IN_PROMPT;
    for (int before = 0; before < int(entry.position); before++)
        generated += batch.entries[number - before].draft == uint32_t(id);
    if (generated > 0 || (counts & IN_PROMPT && entry.flags & COUNTS_PROMPT))
        x = x > 0 ? __fdiv_rn(x, entry.repetition_penalty) : __fmul_rn(x, entry.repetition_penalty);
    if (generated == 0) return x;
    x = __fadd_rn(x, -__fmul_rn(entry.frequency_penalty, float(generated)));
    return __fadd_rn(x, -entry.presence_penalty);
}

DEVICE bool is_masked(const Batch& batch, const Entry& entry, int id) {
    const Slots& slots = batch.slots;
    const size_t bitmap = size_t(entry.slot) * slots.words;
    if (entry.flags & HAS_ALLOWED && !is_set(slots.allowed + bitmap, id)) return true;
    if (entry.flags & IS_SUPPRESSED && is_set(slots.stops + bitmap, id)) return true;
    return entry.mask != NONE && !is_set(batch.masks + size_t(entry.mask) * slots.words, id);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
sample_process(Batch batch) {
    __shared__ float scores[BLOCK_IDS];
    dependency_wait();
    dependency_launch();
    const int number = blockIdx.y, vocabulary = batch.slots.vocabulary;
    const Entry entry = batch.entries[number];
    if (!(entry.flags & IS_PROCESSED)) return;
    const int start = blockIdx.x * BLOCK_IDS, count = min(BLOCK_IDS, vocabulary - start);
    const float* source = entry.processed != NONE ? batch.processed + size_t(entry.processed) * vocabulary
                                                  : batch.logits + size_t(entry.row) * vocabulary;
    for (int i = threadIdx.x; i < count; i += ROW_THREADS) scores[i] = source[start + i];
    __syncthreads();
    const Bias* biases = batch.slots.biases + size_t(entry.slot) * batch.slots.list;
    for (int i = threadIdx.x; i < int(entry.num_biases); i += ROW_THREADS) {
        const int id = biases[i].id - start;
        if (id < 0 || id >= count || (i > 0 && biases[i - 1].id == biases[i].id)) continue;
        // The thread of the first bias of an id adds all of them.
        for (int next = i; next < int(entry.num_biases) && biases[next].id == biases[i].id; next++)
            scores[id] += biases[next].value;
    }
    __syncthreads();
    float* out = batch.scores + size_t(number) * vocabulary + start;
    for (int i = threadIdx.x; i < count; i += ROW_THREADS) {
        float x = scores[i];
        if (entry.flags & IS_COUNTED) x = penalised(batch, entry, number, start + i, x);
        out[i] = is_masked(batch, entry, start + i) ? -infinity() : x;
    }
}
EXPORT(sample_process)

// The tokens of a slot, as an entry sees them.
struct History {
    const uint32_t* tokens;
    const Entry* drafts;  // from the one at position 1 on
    int length, all;

    DEVICE uint32_t at(int i) const { return i < length ? tokens[i] : drafts[i - length].draft; }
    // Whether the `count` tokens before `end` are `ids`.
    template <class Ids>
    DEVICE bool ends_with(int end, int count, Ids ids) const {
        if (count > end) return false;
        for (int back = 1; back <= count; back++)
            if (at(end - back) != ids(count - back)) return false;
        return true;
    }
};

// Several threads may exclude the same id.
DEVICE void exclude(float& score) { atomicExch(&score, -infinity()); }

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
sample_exclude(Batch batch) {
    dependency_wait();
    dependency_launch();
    const int number = blockIdx.y;
    const Entry entry = batch.entries[number];
    if (entry.no_repeat_ngram_size == 0 && entry.num_sequences == 0) return;
    const Slots& slots = batch.slots;
    const int length = slots.lengths[entry.slot];
    const History history = {slots.history + size_t(entry.slot) * slots.positions,
                             batch.entries + number - entry.position + 1, length, length + int(entry.position)};
    float* scores = batch.scores + size_t(number) * slots.vocabulary;
    const int first = blockIdx.x * ROW_THREADS + threadIdx.x, step = gridDim.x * ROW_THREADS;

    const uint32_t* ends = slots.sequences + size_t(entry.slot) * (2 * slots.list + 1);
    const uint32_t* ids = ends + entry.num_sequences + 1;
    for (int i = first; i < int(entry.num_sequences); i += step) {
        const uint32_t *sequence = ids + ends[i], last = ends[i + 1] - ends[i] - 1;
        if (history.ends_with(history.all, last, [&](int n) { return sequence[n]; }) &&
            sequence[last] < uint32_t(slots.vocabulary))
            exclude(scores[sequence[last]]);
    }
    if (entry.no_repeat_ngram_size == 0) return;
    const int run = entry.no_repeat_ngram_size - 1, start = history.all - run;
    for (int end = first + run; end < history.all; end += step) {
        const uint32_t next = history.at(end);
        if (history.ends_with(end, run, [&](int n) { return history.at(start + n); }) &&
            next < uint32_t(slots.vocabulary))
            exclude(scores[next]);
    }
}
EXPORT(sample_exclude)

DEVICE void find_highest(const Row& row, const float* scores, float* highest) {
    const int lane = threadIdx.x % 32, first = (blockIdx.x * ROW_THREADS + threadIdx.x) / 32 * 4;
    float best[4];
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        best[tile] = -infinity();
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int id = (first + tile) * TILE + part * 32 + lane;
            if (id < row.vocabulary) best[tile] = larger(scores[id], best[tile]);
        }
    }
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        const float found = warp_max(best[tile]);
        if (lane == 0 && first + tile < row.tiles) highest[first + tile] = found;
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
sample_maxima(Batch batch) {
    dependency_wait();
    dependency_launch();
    const int number = blockIdx.y;
    const Entry entry = batch.entries[number];
    const Row row = scores_row(batch, entry, number);
    find_highest(row, row.scores, batch.highest + size_t(number) * row.tiles);
    if (!has_own_logits(entry)) return;
    find_highest(row, logits_row(batch, entry, number).scores, batch.highest_logits + size_t(number) * row.tiles);
}
EXPORT(sample_maxima)

// The weights of a tile; an id beyond the vocabulary has the weight 0.
DEVICE void load_weights(float (&weights)[4], const Row& row, int tile, float best, float factor) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int id = tile * TILE + part * 32 + threadIdx.x % 32;
        weights[part] = weight_of(id < row.vocabulary ? row.scores[id] : -infinity(), best, factor);
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
sample_weights(Batch batch) {
    __shared__ float partial[2][ROW_THREADS / 32];
    dependency_wait();
    dependency_launch();
    const int number = blockIdx.y;
    const Entry entry = batch.entries[number];
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const int warp_tile = (blockIdx.x * ROW_THREADS + threadIdx.x) / 32;
    float weights[4];
    if (entry.given == NONE && !(entry.flags & IS_GREEDY)) {
        const Row row = scores_row(batch, entry, number);
        const float best = highest_of(row.highest, row.tiles, partial[0]);
        const bool is_bounded = entry.top_k > 0 || entry.top_n_sigma > 0;
        const uint32_t last = is_bounded ? batch.bounds[number].rank : NONE;
        for (int tile = warp_tile * 4; tile < min(warp_tile * 4 + 4, row.tiles); tile++) {
            float sum = 0;
            if (rank_of(row.highest[tile]) <= last) {
                load_weights(weights, row, tile, best, entry.factor);
                add_tile(sum, weights);
                sum = sum_of_chains(sum);
            }
            if (is_first_lane) batch.sums[size_t(number) * row.tiles + tile] = sum;
        }
    }
    if (entry.flags & HAS_LOGPROBS) {
        const Row row = logprobs_row(batch, entry, number);
        const float best = highest_of(row.highest, row.tiles, partial[1]);
        float chain = 0;
        for (int tile = warp_tile * 4; tile < min(warp_tile * 4 + 4, row.tiles); tile++) {
            load_weights(weights, row, tile, best, logprobs_factor(entry));
            add_tile(chain, weights);
        }
        const int warp_tiles = ceil_div(row.vocabulary, WARP_IDS);
        const float sum = sum_of_chains(chain);
        if (is_first_lane && warp_tile < warp_tiles) batch.sums_of_exp[size_t(number) * warp_tiles + warp_tile] = sum;
    }
}
EXPORT(sample_weights)
