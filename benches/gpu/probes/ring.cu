// Reads memory through a ring of 4 slots in shared memory, by cp.async as the kernels of products do.
#include "ring.cuh"

constexpr int SLOTS = 4, THREADS = 256;

// Grid: any. Dynamic shared memory: the slots.
extern "C" __global__ void __launch_bounds__(THREADS) ring_async(Ring call) {
    DYNAMIC_SHARED(unsigned char, slots);
    if (call.trigger == EARLY) dependency_launch();
    Chunks next(call, blockIdx.x, gridDim.x);
    auto copy = [&](int slot) {
        if (next.exists()) {
            const uint8_t* from = next.address();
            for (int byte = threadIdx.x * 16; byte < call.chunk_bytes; byte += THREADS * 16)
                copy_async<16>(slots + slot * call.chunk_bytes + byte, from + byte);
        }
        copy_commit();
        next.advance();
    };
    for (int slot = 0; slot < SLOTS - 1; slot++) copy(slot);
    dependency_wait();
    if (call.trigger == LATE) dependency_launch();
    uint32_t word = 0;
    int slot = 0;
    for (uint64_t i = blockIdx.x; i < call.total; i += gridDim.x) {
        copy_wait<SLOTS - 2>();
        __syncthreads();  // the slot is complete, and the one before it has been read
        word = *reinterpret_cast<const uint32_t*>(slots + slot * call.chunk_bytes);
        copy((slot + SLOTS - 1) % SLOTS);
        slot = (slot + 1) % SLOTS;
    }
    copy_wait<0>();
    if (threadIdx.x == 0) call.out[blockIdx.x] = word;
}
EXPORT(ring_async)
