// From weights to tokens: the kernels of sampling in which a block has a row of its own.
//
//     sample_bounds   top_n_sigma and top_k: which tiles have a candidate
//     sample_finish   filters and draw; appends the token of a slot with one entry
//     sample_commit   verifies the drafts of slots with several entries, and appends their tokens
//     sample_logprobs the distribution of log probabilities, and the most likely ids
//
// Data      See Batch in sample.cuh. Log probabilities return the scores of the most likely ids, in any order: the host
//           sorts them and computes the logarithms.
// Shape     one block of 256 threads per entry; for sample_commit, grid ceil(entries / 256).
// Limit     latency: a greedy row reads the highest score of each tile and one tile; a draw without filters reads the
//           sums of the tiles and one tile; filters read the tiles that have candidates 4 to 6 times each.
// Source    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", section 3.3 (Philox); Nguyen et al., "Min-p
//           sampling" (arXiv:2407.01082); Meister et al., "Locally typical sampling" (arXiv:2202.00666); Tang et al.,
//           "Top-n-sigma" (arXiv:2411.07641); Hewitt et al., "Truncation Sampling as Language Model Desmoothing"
//           (arXiv:2210.15191; epsilon_cutoff).
#include "sample_filters.cuh"

// A number in [0, 1) with 53 random bits, for token `index` of `seed`: Philox4x32-10.
DEVICE double uniform(uint64_t seed, uint32_t index) {
    uint32_t counter[4] = {index, 0, 0, 0}, key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint32_t high_0 = __umulhi(0xd2511f53u, counter[0]), low_0 = 0xd2511f53u * counter[0];
        const uint32_t high_1 = __umulhi(0xcd9e8d57u, counter[2]), low_1 = 0xcd9e8d57u * counter[2];
        counter[0] = high_1 ^ counter[1] ^ key[0], counter[1] = low_1;
        counter[2] = high_0 ^ counter[3] ^ key[1], counter[3] = low_0;
        key[0] += 0x9e3779b9u, key[1] += 0xbb67ae85u;
    }
    return double((uint64_t(counter[1]) << 32 | counter[0]) >> 11) * (1.0 / 9007199254740992.0);
}

// The lowest id of the highest score; of NaN if there are no numbers; NONE if every score is minus infinity.
DEVICE uint32_t most_likely(Shared& shared, const Row& row, float best) {
    if (threadIdx.x == 0) shared.id = NONE;
    __syncthreads();
    if (best > -infinity()) {
        for (int tile = threadIdx.x; tile < row.tiles; tile += THREADS)
            if (row.highest[tile] == best) atomicMin(&shared.id, uint32_t(tile));
        __syncthreads();
        const int first = int(shared.id) * TILE, id = first + int(threadIdx.x);
        __syncthreads();
        if (threadIdx.x == 0) shared.id = NONE;
        __syncthreads();
        if (threadIdx.x < TILE && id < row.vocabulary && row.scores[id] == best) atomicMin(&shared.id, uint32_t(id));
    } else {
        for (int id = threadIdx.x; id < row.vocabulary; id += THREADS)
            if (row.scores[id] != row.scores[id]) atomicMin(&shared.id, uint32_t(id));
    }
    __syncthreads();
    return shared.id;
}

// The highest id with a weight, NONE if there is none. By one warp.
DEVICE uint32_t last_candidate(const Candidates& candidates) {
    const int lane = threadIdx.x % 32;
    for (int first = (candidates.row.tiles - 1) / 32 * 32; first >= 0; first -= 32) {
        const bool has_any = first + lane < candidates.row.tiles && candidates.has_any(first + lane);
        const uint32_t tiles = __ballot_sync(ALL_LANES, has_any);
        if (!tiles) continue;
        const int start = (first + 31 - __clz(int(tiles))) * TILE;
        for (int part = TILE - 32; part >= 0; part -= 32) {
            const uint32_t ids = __ballot_sync(ALL_LANES, candidates.weight(start + part + lane) > 0);
            if (ids) return start + part + 31 - __clz(int(ids));
        }
    }
    return NONE;
}

// The id at which the running sum of weights exceeds `uniform` times their total.
DEVICE uint32_t draw(Candidates& candidates, double uniform) {
    const Row& row = candidates.row;
    double rest = uniform * candidates.total(), total;
    if (threadIdx.x < 32) {
        uint32_t found = NONE;
        int tile = find_exceeding(row.tiles, rest, total, [&](int i) { return double(candidates.sums[i]); });
        for (; found == NONE && tile < row.tiles; tile++) {
            if (!candidates.has_any(tile)) continue;
            const int id = find_exceeding(TILE, rest, total,
                                          [&](int i) { return double(candidates.weight(tile * TILE + i)); });
            if (id < TILE) found = tile * TILE + id;
        }
        if (found == NONE) found = last_candidate(candidates);  // rounding left a remainder
        if (threadIdx.x == 0) candidates.shared.id = found;
    }
    __syncthreads();
    return candidates.shared.id;
}

DEVICE uint32_t sample(Shared& shared, const Batch& batch, const Entry& entry, int number) {
    const Row row = scores_row(batch, entry, number);
    const float best = highest_of(row.highest, row.tiles, shared.partial);
    if (entry.flags & IS_GREEDY || !is_finite(best)) return most_likely(shared, row, best);
    const size_t first = size_t(number) * row.tiles;
    Candidates candidates = {shared, row, batch.sums + first, batch.masses + first, best, entry.factor};
#pragma unroll 1
    for (int filter = 0; filter < NUM_FILTERS; filter++)
        if (is_set(entry, Filter(filter))) candidates.apply(Filter(filter), entry, batch.bounds[number]);
    return draw(candidates, uniform(entry.seed, entry.index));
}

// Writes the ids of the `count` highest scores to `tops`, in any order, without those of minus infinity. Returns their
// number.
DEVICE uint32_t collect_highest(Shared& shared, const Row& row, float best, uint32_t count, uint64_t* masses,
                                Top* tops) {
    const uint32_t needed = rank_needed(shared, row, best, count);
    const auto is_active = [&](int tile) { return rank_of(row.highest[tile]) <= needed; };
    const Prefix prefix = find_prefix(shared, row, rank_of(best), needed, count, masses, is_active,
                                      [&](int id) { return by_score(row.scores[id]); });
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    for_tiles(row.tiles, is_active, [&](int tile) {
        for (int id = tile * TILE + threadIdx.x % 32; id < min((tile + 1) * TILE, row.vocabulary); id += 32) {
            const float score = row.scores[id];
            if (score > -infinity() && prefix.includes(rank_of(score), id))
                tops[atomicAdd(&shared.count, 1u)] = {uint32_t(id), score};
        }
    });
    __syncthreads();
    return shared.count;
}

// Whether the position after a draft is sampled: all tokens before it are the slot's, the last of them is the draft,
// and the draft does not end the request.
DEVICE bool confirms(const Slots& slots, const Entry& entry) {
    const uint32_t draft = entry.draft, *stops = slots.stops + size_t(entry.slot) * slots.words;
    return entry.index > 0 && slots.generated[entry.slot] == entry.index && slots.last_tokens[entry.slot] == draft &&
           !(entry.flags & HAS_STOPS && stops[draft / 32] >> draft % 32 & 1);
}

// Appends the token of an entry to its slot, unless its draft was wrong.
DEVICE void commit(const Slots& slots, const Entry& entry, Result& result) {
    const uint32_t slot = entry.slot, token = result.token;
    if (entry.draft != NONE && !confirms(slots, entry)) result.outcome = IS_REJECTED;
    if (result.outcome != IS_TOKEN) return;
    slots.last_tokens[slot] = token;
    slots.generated[slot] += 1;
    if (entry.flags & IS_COUNTED) slots.counts[size_t(slot) * slots.vocabulary + token] += 1;
    // Tokens behind the longest sequence are never used.
    const uint32_t length = slots.lengths[slot];
    if (!(entry.flags & IS_RECORDED) || int(length) >= slots.positions) return;
    slots.history[size_t(slot) * slots.positions + length] = token;
    slots.lengths[slot] = length + 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sample_bounds(Batch batch) {
    __shared__ Shared shared;
    dependency_wait();
    dependency_launch();
    const int number = blockIdx.x;
    const Entry entry = batch.entries[number];
    if (entry.given != NONE || entry.flags & IS_GREEDY) return;
    const Row row = scores_row(batch, entry, number);
    const float best = highest_of(row.highest, row.tiles, shared.partial);
    Bounds bounds = {-infinity(), NONE};
    const bool has_order = is_finite(best);
    if (has_order && entry.top_k > 0) bounds.rank = rank_needed(shared, row, best, entry.top_k);
    if (has_order && entry.top_n_sigma > 0) {
        bounds.floor = sigma_floor(shared, row, best, entry.top_n_sigma);
        bounds.rank = min(bounds.rank, rank_of(bounds.floor));
    }
    if (threadIdx.x == 0) batch.bounds[number] = bounds;
}
EXPORT(sample_bounds)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sample_finish(Batch batch) {
    __shared__ Shared shared;
    dependency_wait();
    dependency_launch();
    const int number = blockIdx.x;
    const Entry entry = batch.entries[number];
    Result result = {};
    const uint32_t token = entry.given != NONE ? entry.given : sample(shared, batch, entry, number);
    result.token = token == NONE ? 0 : token;
    result.outcome = token == NONE ? NO_CANDIDATES : IS_TOKEN;
    if (threadIdx.x != 0) return;
    if (entry.length == 1) commit(batch.slots, entry, result);
    batch.results[number] = result;
}
EXPORT(sample_finish)

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
sample_commit(Batch batch, int count) {
    dependency_wait();
    dependency_launch();
    const int first = blockIdx.x * ROW_THREADS + threadIdx.x;
    if (first >= count) return;
    const int length = batch.entries[first].length;
    for (int number = first; length > 1 && number < first + length; number++)
        commit(batch.slots, batch.entries[number], batch.results[number]);
}
EXPORT(sample_commit)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sample_logprobs(Batch batch) {
    __shared__ Shared shared;
    dependency_wait();
    dependency_launch();
    const int number = blockIdx.x;
    const Entry entry = batch.entries[number];
    Result result = batch.results[number];
    if (!(entry.flags & HAS_LOGPROBS) || result.outcome != IS_TOKEN) return;
    const Row row = logprobs_row(batch, entry, number);
    const float best = highest_of(row.highest, row.tiles, shared.partial);
    uint64_t* masses = batch.masses + size_t(number) * row.tiles;
    if (entry.num_top > 0)
        result.num_top = collect_highest(shared, row, best, entry.num_top, masses, batch.tops + entry.first_top);
    if (threadIdx.x >= 32) return;
    const int warp_tiles = ceil_div(row.vocabulary, WARP_IDS);
    const float* sums = batch.sums_of_exp + size_t(number) * warp_tiles;
    double rest = 0;
    find_exceeding(warp_tiles, rest, result.sum, [&](int warp_tile) { return double(sums[warp_tile]); });
    if (threadIdx.x != 0) return;
    result.best = best;
    result.score = row.scores[result.token];
    batch.results[number] = result;
}
EXPORT(sample_logprobs)
