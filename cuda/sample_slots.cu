// The state of a slot when a sequence is admitted.
//
//     sample_admit    the numbers of the slot; clears its counts
//     sample_count    counts the tokens of its history
//
// Data      See Slots in sample.cuh. Bitmaps, biases, sequences and history are copied by the host, as far as the
//           request has them.
// Shape     grid ceil(vocabulary / 4096), or 1 if no tokens are counted; ceil(tokens / 4096).
// Limit     latency.
#include "sample.cuh"

struct Admission {
    uint32_t slot, last_token, length, generated;  // tokens in the history, and those of them that were generated
    uint32_t is_counted;
};

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
sample_admit(Slots slots, Admission admission) {
    dependency_wait();
    dependency_launch();
    const uint32_t slot = admission.slot;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        slots.last_tokens[slot] = admission.last_token;
        slots.lengths[slot] = admission.length;
        slots.generated[slot] = admission.generated;
    }
    if (!admission.is_counted) return;
    const int start = blockIdx.x * BLOCK_IDS, end = min(start + BLOCK_IDS, slots.vocabulary);
    uint32_t* counts = slots.counts + size_t(slot) * slots.vocabulary;
    for (int id = start + threadIdx.x; id < end; id += ROW_THREADS) counts[id] = 0;
}
EXPORT(sample_admit)

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
sample_count(Slots slots, Admission admission) {
    dependency_wait();
    dependency_launch();
    const uint32_t* history = slots.history + size_t(admission.slot) * slots.positions;
    uint32_t* counts = slots.counts + size_t(admission.slot) * slots.vocabulary;
    const int start = blockIdx.x * BLOCK_IDS, end = min(start + BLOCK_IDS, int(admission.length));
    for (int i = start + threadIdx.x; i < end; i += ROW_THREADS) {
        const uint32_t token = history[i];
        if (token >= uint32_t(slots.vocabulary)) continue;
        if (i < int(admission.length - admission.generated))
            atomicOr(&counts[token], IN_PROMPT);
        else
            atomicAdd(&counts[token], 1u);
    }
}
EXPORT(sample_count)
