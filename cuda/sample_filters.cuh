// The candidates of a row, ids that may be sampled, and the filters that remove some of them.
//
// A candidate is an id that every filter so far keeps. Each filter is a limit of the score, of the weight or of a rank,
// so no list of candidates is stored: the weight of an id is computed again where it is needed.
#pragma once
#include "sample_select.cuh"

// A bound on the error of a logarithm.
constexpr float SLACK = 1e-3f;

// Masses of weights are in units of 2^-45: 2^18 ids of weight 1 fit into 64 bits.
constexpr float MASS_UNITS = 35184372088832.0f;
DEVICE uint64_t mass_of_weight(float weight) { return uint64_t(weight * MASS_UNITS); }
DEVICE uint64_t mass_of_sum(double sum) { return uint64_t(ceil(sum * double(MASS_UNITS))); }

// The filters, in the order of their application:
// - the scores down to a number of standard deviations below the best
// - exactly this number of the highest scores
// - the fewest of the heaviest that hold a share of the weight
// - those with a share of the best's weight
// - the fewest that hold a share of the weight, in the order of the distance of their log weight to its mean. This is
//   the distance between surprise and entropy: both are negated log weights plus the same constant.
// - those that have a share of the weight each, or else the heaviest
enum Filter { TOP_N_SIGMA, TOP_K, TOP_P, MIN_P, TYPICAL_P, EPSILON_CUTOFF, NUM_FILTERS };

DEVICE bool is_set(const Entry& entry, Filter filter) {
    switch (filter) {
        case TOP_N_SIGMA: return entry.top_n_sigma > 0;
        case TOP_K: return entry.top_k > 0;
        case TOP_P: return entry.top_p < 1;
        case MIN_P: return entry.min_p > 0;
        case TYPICAL_P: return entry.typical_p < 1;
        default: return entry.epsilon_cutoff > 0;
    }
}

enum Order { BY_SCORE, BY_WEIGHT, BY_DISTANCE };

struct Candidates {
    Shared& shared;
    Row row;
    float* sums;       // of each tile; 0 if it has no candidates
    uint64_t* masses;  // see find_prefix
    float best, factor;
    float lowest_score = -infinity(), lowest_weight = 0, mean = 0;
    Prefix by_score = {}, by_weight = {}, by_distance = {};

    DEVICE uint32_t distance(float score) const {
        return __float_as_uint(fabsf(__fadd_rn(log_weight(score, best, factor), -mean)));
    }
    // 0 for an id that is no candidate.
    DEVICE float weight(int id) const {
        if (id >= row.vocabulary) return 0;
        const float score = row.scores[id], weight = weight_of(score, best, factor);
        const bool is_left = !(score < lowest_score) && weight >= lowest_weight &&
                             by_score.includes(rank_of(score), id) &&
                             by_weight.includes(~__float_as_uint(weight), id) &&
                             by_distance.includes(distance(score), id);
        return is_left ? weight : 0;
    }
    DEVICE bool has_any(int tile) const { return sums[tile] > 0; }

    // Sums the tiles again.
    DEVICE void update() {
        for_tiles(row.tiles, [&](int tile) { return has_any(tile); }, [&](int tile) {
            float weights[4], sum = 0;
            for (int part = 0; part < 4; part++) weights[part] = weight(tile * TILE + part * 32 + threadIdx.x % 32);
            add_tile(sum, weights);
            sum = sum_of_chains(sum);
            if (threadIdx.x % 32 == 0) sums[tile] = sum;
        });
        __syncthreads();
    }
    // Removes the tiles in which no log weight reaches `floor`.
    DEVICE void cut_tiles_below(float floor) {
        for (int tile = threadIdx.x; tile < row.tiles; tile += THREADS)
            if (log_weight(row.highest[tile], best, factor) < floor) sums[tile] = 0;
        __syncthreads();
    }
    // The sum of all weights.
    DEVICE double total() {
        if (threadIdx.x < 32) {
            double rest = 0, total;
            find_exceeding(row.tiles, rest, total, [&](int tile) { return double(sums[tile]); });
            if (threadIdx.x == 0) shared.total = total;
        }
        __syncthreads();
        return shared.total;
    }
    // The largest weight: not that of the best id if a filter has removed it.
    DEVICE float heaviest() {
        float most = 0;
        for_tiles(row.tiles, [&](int tile) { return has_any(tile); }, [&](int tile) {
            for (int part = 0; part < 4; part++)
                most = fmaxf(most, weight(tile * TILE + part * 32 + threadIdx.x % 32));
        });
        most = warp_max(most);
        if (threadIdx.x % 32 == 0) shared.partial[threadIdx.x / 32] = most;
        __syncthreads();
        for (int warp = 0; warp < WARPS; warp++) most = fmaxf(most, shared.partial[warp]);
        return most;
    }
    DEVICE Ranked ranked(int id, Order order) const {
        if (order == BY_SCORE) return {rank_of(row.scores[id]), 1};
        const float mass = weight(id);
        return {order == BY_WEIGHT ? ~__float_as_uint(mass) : distance(row.scores[id]), mass_of_weight(mass)};
    }
    // Keeps the ids of the lowest ranks, the lowest ids first among equals, until their masses add up to `wanted`. For
    // the limits see find_cutoff.
    DEVICE void keep_lowest_ranks(Order order, uint32_t first, uint32_t last, uint64_t wanted) {
        const auto is_active = [&](int tile) { return has_any(tile); };
        const Prefix found = find_prefix(shared, row, first, last, wanted, masses, is_active,
                                         [&](int id) { return ranked(id, order); });
        if (order == BY_SCORE) by_score = found;
        if (order == BY_WEIGHT) by_weight = found;
        if (order == BY_DISTANCE) by_distance = found;
    }

    // Applies a filter. One function for all, because each place of a search is a copy of its code.
    DEVICE void apply(Filter filter, const Entry& entry, const Bounds& bounds) {
        Order order = BY_SCORE;
        uint32_t first = rank_of(best), last = NONE;
        uint64_t wanted = entry.top_k;
        if (filter == TOP_N_SIGMA) lowest_score = bounds.floor;
        if (filter == TOP_K) last = bounds.rank;
        if (filter == MIN_P) lowest_weight = entry.min_p;
        if (filter == EPSILON_CUTOFF) {
            const float floor = float(double(entry.epsilon_cutoff) * total());
            lowest_weight = fmaxf(lowest_weight, fminf(floor, heaviest()));
        }
        if (filter == MIN_P || filter == EPSILON_CUTOFF) cut_tiles_below(logf(lowest_weight) - SLACK);
        if (filter == TOP_P || filter == TYPICAL_P) {
            const float share = filter == TOP_P ? entry.top_p : entry.typical_p;
            const double sum = total();
            // A weight such that no lighter id is needed. Half of the exact one, because sums are rounded.
            const float floor = float((1 - double(share)) * sum / row.vocabulary / 2);
            wanted = mass_of_sum(double(share) * sum);
            float lowest = logf(floor);
            order = BY_WEIGHT, first = ~__float_as_uint(1.0f), last = ~__float_as_uint(floor);
            if (filter == TYPICAL_P) {
                mean = float(mean_log_weight(sum));
                // An id with a surprise of twice the entropy or more is farther from it than every likelier id, so it
                // is not needed if the likelier ones suffice.
                const float farthest = fmaxf(mean - lowest, logf(float(sum)) - mean) + SLACK;
                lowest = mean - farthest;
                order = BY_DISTANCE, first = 0, last = __float_as_uint(farthest);
            }
            cut_tiles_below(lowest - SLACK);
        }
        if (filter == TOP_K || filter == TOP_P || filter == TYPICAL_P) keep_lowest_ranks(order, first, last, wanted);
        update();
    }
    DEVICE double mean_log_weight(double sum);
};

// The sum of `x` over the threads of the block; every thread has the same bits. Not twice without a barrier between.
DEVICE double block_sum_f64(double x, double (&partial)[WARPS]) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int warp = 0; warp < WARPS; warp++) sum += partial[warp];
    return sum;
}

// The CPU adds the products of a tile in 8 chains of float32, and the chains in float64.
DEVICE double Candidates::mean_log_weight(double sum) {
    const int lane = threadIdx.x % 32;
    double products = 0;
    for_tiles(row.tiles, [&](int tile) { return has_any(tile); }, [&](int tile) {
        const int chained = min(TILE, row.vocabulary - tile * TILE) / 8 * 8;
        float chain = 0, rest = 0;
        for (int part = 0; part < 4; part++) {
            const int id = tile * TILE + part * 32 + lane;
            const float w = weight(id);
            const float product = w > 0 ? __fmul_rn(w, log_weight(row.scores[id], best, factor)) : 0;
            const bool is_chained = part * 32 + lane < chained;
            for (int from = 0; from < 4; from++)
                chain = __fadd_rn(chain, __shfl_sync(ALL_LANES, is_chained ? product : 0, from * 8 + lane % 8));
            rest += is_chained ? 0 : product;  // in one part of one tile
        }
        for (int from = 0; from < 8; from++) products += double(__shfl_sync(ALL_LANES, chain, from));
        for (int from = 0; from < 8; from++) {
            const float last = __shfl_sync(ALL_LANES, rest, (chained + from) % 32);
            products += row.vocabulary - tile * TILE < TILE ? double(last) : 0;
        }
    });
    return block_sum_f64(lane == 0 ? products : 0, shared.sums[0]) / sum;
}

// The lowest score that top_n_sigma keeps: `count` standard deviations below the best. Scores of minus infinity and NaN
// do not count.
DEVICE float sigma_floor(Shared& shared, const Row& row, float best, float count) {
    double scores = 0, sum = 0, squares = 0;
    for (int id = threadIdx.x; id < row.vocabulary; id += THREADS) {
        if (!(row.scores[id] > -infinity())) continue;
        const double distance = double(best) - double(row.scores[id]);
        scores += 1, sum += distance, squares += distance * distance;
    }
    scores = block_sum_f64(scores, shared.sums[0]);
    const double mean = block_sum_f64(sum, shared.sums[1]) / scores;
    const double variance = block_sum_f64(squares, shared.sums[2]) / scores - mean * mean;
    return float(double(best) - double(count) * sqrt(variance > 0 ? variance : 0));
}
