// Searches of sampling: the end of a sorted prefix, without sorting, and the element at which a running sum exceeds a
// number.
//
// Every id has a rank, an integer, and a mass. A prefix is the shortest list of ids, lowest rank first and the lowest
// ids first among equals, of which the masses add up to a given sum. A pass adds the masses by the leading 11 bits of
// the ranks and finds the digit in which the sum is reached; the next pass looks only there. Three passes resolve all
// 32 bits. Source: Alabi et al., "Fast k-selection algorithms for graphics processing units", section 3 (radix select).
#pragma once
#include "sample.cuh"

constexpr int THREADS = 256;  // of a block with a row of its own
constexpr int WARPS = THREADS / 32;
constexpr int DIGIT = 11;  // bits
constexpr int BINS = 1 << DIGIT;
constexpr int THREAD_BINS = BINS / THREADS;

// The memory of a block for all its searches.
struct Shared {
    uint32_t low[BINS], high[BINS];  // the halves of the masses
    uint64_t totals[WARPS];
    uint64_t remaining, mass;
    double sums[3][WARPS], total;
    float partial[WARPS];
    uint32_t digit, count, id;
};

struct Ranked {
    uint32_t rank;
    uint64_t mass;
};

// The ids of lower ranks, and those of this rank up to `last`. The default has all ids.
struct Prefix {
    uint32_t rank = NONE, last = NONE;

    DEVICE bool includes(uint32_t other, uint32_t id) const { return other < rank || (other == rank && id <= last); }
};

// A rank at which masses reach a sum, the sum without those of lower ranks, and the masses of the rank.
struct Cutoff {
    uint32_t rank;
    uint64_t remaining, mass;
};

// Adds a mass to a bin, which is two words because there is no addition of 64 bits in shared memory.
DEVICE void add_mass(Shared& shared, uint32_t bin, uint64_t mass) {
    const uint32_t low = uint32_t(mass), before = atomicAdd(&shared.low[bin], low);
    const uint32_t high = uint32_t(mass >> 32) + (before + low < before);
    if (high) atomicAdd(&shared.high[bin], high);
}
DEVICE uint64_t mass_of(const Shared& shared, int bin) { return uint64_t(shared.high[bin]) << 32 | shared.low[bin]; }

// Finds the bin at which the masses reach shared.remaining, and reduces that by the masses before it.
DEVICE void find_bin(Shared& shared) {
    const int lane = threadIdx.x % 32, first = threadIdx.x * THREAD_BINS;
    const uint64_t wanted = shared.remaining;
    uint64_t sum = 0;
    for (int i = 0; i < THREAD_BINS; i++) sum += mass_of(shared, first + i);
    uint64_t before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(ALL_LANES, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) shared.totals[threadIdx.x / 32] = before;
    before -= sum;
    __syncthreads();
    for (int warp = 0; warp < int(threadIdx.x) / 32; warp++) before += shared.totals[warp];
    if (before >= wanted || before + sum < wanted) return;
    int bin = first;
    for (; before + mass_of(shared, bin) < wanted; bin++) before += mass_of(shared, bin);
    shared.digit = bin;
    shared.remaining = wanted - before;
    shared.mass = mass_of(shared, bin);
}

// The cutoff at which masses reach `wanted`. `visit(add)` calls add(ranked) for every element, in any thread. No rank
// is below `first`; no rank above `last` may be needed. If there is too little mass, the prefix has all of these ranks.
template <class Visit>
DEVICE Cutoff find_cutoff(Shared& shared, uint32_t first, uint32_t last, uint64_t wanted, Visit visit) {
    int bits = 32 - __clz(int(last - first));
    __syncthreads();
    if (threadIdx.x == 0) shared.remaining = max(wanted, uint64_t(1));  // the prefix is never empty
    while (true) {
        const int shift = max(bits - DIGIT, 0);
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.low[bin] = shared.high[bin] = 0;
        if (threadIdx.x == 0) shared.digit = NONE, shared.mass = 0;
        __syncthreads();
        visit([&](Ranked ranked) {
            const uint32_t digit = (ranked.rank - first) >> shift;  // lower ranks wrap around
            if (digit < BINS && ranked.mass > 0) add_mass(shared, digit, ranked.mass);
        });
        __syncthreads();
        find_bin(shared);
        __syncthreads();
        const uint32_t digit = shared.digit;
        const Cutoff found = {first + (digit << shift), shared.remaining, shared.mass};
        __syncthreads();
        if (digit == NONE) {
            const uint64_t end = uint64_t(first) + (uint64_t(1) << bits) - 1;
            return {uint32_t(min(end, uint64_t(NONE))), 0, 0};
        }
        if (shift == 0) return found;
        first = found.rank;
        bits = shift;
    }
}

// Calls body(tile) in all lanes of a warp for the tiles for which is_active(tile) is true. A warp always has the same
// tiles, so it may change its own ones.
template <class IsActive, class Body>
DEVICE void for_tiles(int tiles, IsActive is_active, Body body) {
    const int warp = threadIdx.x / 32;
    for (int start = 0; start * WARPS < tiles; start += 32) {
        const int mine = (start + int(threadIdx.x) % 32) * WARPS + warp;
        uint32_t active = __ballot_sync(ALL_LANES, mine < tiles && is_active(mine));
        __syncwarp();  // the body may change a tile that another lane has read
        for (; active; active &= active - 1) body((start + __ffs(int(active)) - 1) * WARPS + warp);
    }
}

// Of `count` values, the index of the first at which the running sum exceeds `rest`, which is reduced by the sum before
// it; `count` if there is none. The same in all lanes of a warp. `total` is the sum of all values.
template <class T, class Value>
DEVICE int find_exceeding(int count, T& rest, T& total, Value value) {
    const int lane = threadIdx.x % 32, share = ceil_div(count, 32);
    const int first = min(lane * share, count), end = min(first + share, count);
    T sum = 0, before = 0;
    for (int i = first; i < end; i++) sum += value(i);
    for (int other = 0; other < 32; other++) {
        const T one = __shfl_sync(ALL_LANES, sum, other);
        if (other < lane) before += one;
    }
    total = __shfl_sync(ALL_LANES, before + sum, 31);
    const uint32_t exceeding = __ballot_sync(ALL_LANES, rest < before + sum);
    if (!exceeding) {
        rest -= total;
        return count;
    }
    const int owner = __ffs(int(exceeding)) - 1;
    T left = rest - before;
    int found = first;
    for (; found < end; found++) {
        const T one = value(found);
        if (left < one) break;  // if none is, because sums are rounded, the element is in the next lane's share
        left -= one;
    }
    rest = __shfl_sync(ALL_LANES, left, owner);
    return __shfl_sync(ALL_LANES, found, owner);
}

// The prefix of masses `wanted` among the ids of a row. is_active(tile) says whether a tile has such ids, and
// ranked(id) is an id's rank and mass. For the limits see find_cutoff. `masses` has an element for each tile.
template <class IsActive, class RankOf>
DEVICE Prefix find_prefix(Shared& shared, const Row& row, uint32_t first, uint32_t last, uint64_t wanted,
                          uint64_t* masses, IsActive is_active, RankOf ranked) {
    const int lane = threadIdx.x % 32;
    const auto visit = [&](auto add) {
        for_tiles(row.tiles, is_active, [&](int tile) {
            for (int id = tile * TILE + lane; id < min((tile + 1) * TILE, row.vocabulary); id += 32) add(ranked(id));
        });
    };
    const Cutoff cutoff = find_cutoff(shared, first, last, wanted, visit);
    if (cutoff.mass <= cutoff.remaining) return {cutoff.rank, NONE};
    // Some of the ids with the cutoff's own rank: the lowest ones. Usually there is one.
    const auto mass_at_cutoff = [&](int id) {
        const Ranked found = id < row.vocabulary ? ranked(id) : Ranked{0, 0};
        return found.rank == cutoff.rank ? found.mass : uint64_t(0);
    };
    for (int tile = threadIdx.x; tile < row.tiles; tile += THREADS) masses[tile] = 0;
    __syncthreads();
    for_tiles(row.tiles, is_active, [&](int tile) {
        uint64_t mass = 0;
        for (int part = 0; part < 4; part++) mass += mass_at_cutoff(tile * TILE + part * 32 + lane);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) mass += __shfl_xor_sync(ALL_LANES, mass, step);
        if (lane == 0) masses[tile] = mass;
    });
    __syncthreads();
    if (threadIdx.x < 32) {
        uint64_t rest = cutoff.remaining - 1, total;  // reaching is exceeding one less
        const int tile = find_exceeding(row.tiles, rest, total, [&](int i) { return masses[i]; });
        const int id = find_exceeding(TILE, rest, total, [&](int i) { return mass_at_cutoff(tile * TILE + i); });
        if (lane == 0) shared.id = tile * TILE + id;
    }
    __syncthreads();
    return {cutoff.rank, shared.id};
}

// The key that orders ids by score.
DEVICE Ranked by_score(float score) { return {rank_of(score), 1}; }

// A rank that at least `count` ids reach, if there are as many. A tile of which the highest score has a higher rank
// has none of the first `count` ids.
DEVICE uint32_t rank_needed(Shared& shared, const Row& row, float best, uint32_t count) {
    return find_cutoff(shared, rank_of(best), NONE, count, [&](auto add) {
        for (int tile = threadIdx.x; tile < row.tiles; tile += THREADS) add(by_score(row.highest[tile]));
    }).rank;
}
