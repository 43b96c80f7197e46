// Reads memory through a ring of 8 slots in shared memory by bulk copies, which one thread begins: the copy engine of
// compute capability 9.0, without tensor maps. The emulated device has no such copies.
#include "ring.cuh"
#ifndef PENSTOCK_HOST

constexpr int SLOTS = 8;
// A wait for a barrier, and its limit: a defect ends the kernel with an error, and not in an endless loop.
constexpr int MOST_TRIES = 1 << 22;

DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

struct Barrier {
    uint32_t address;

    DEVICE void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
    }
    // Arrives, and lets the phase end when that many bytes have been copied.
    DEVICE void expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    // Arrives at the barrier of the same address of a block of the cluster.
    DEVICE void arrive(uint32_t block) const {
        asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                     "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(address), "r"(block)
                     : "memory");
    }
    DEVICE void wait(uint32_t parity) const {
        for (int i = 0; i < MOST_TRIES; i++) {
            uint32_t is_complete;
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                         : "=r"(is_complete)
                         : "r"(address), "r"(parity)
                         : "memory");
            if (is_complete) return;
        }
        asm volatile("trap;");
    }
};

// The barriers of the slots.
struct Slots {
    uint64_t full[SLOTS], empty[SLOTS];

    DEVICE Barrier is_full(int slot) const { return {shared_address(&full[slot])}; }
    DEVICE Barrier is_empty(int slot) const { return {shared_address(&empty[slot])}; }
};

// Grid: any; 32 threads. Dynamic shared memory: the slots.
extern "C" __global__ void __launch_bounds__(32) ring_bulk(Ring call) {
    DYNAMIC_SHARED(unsigned char, bytes);
    __shared__ Slots slots;
    if (call.trigger == EARLY) dependency_launch();
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) slots.is_full(slot).init(1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        Chunks next(call, blockIdx.x, gridDim.x);
        auto copy = [&](int slot) {
            if (!next.exists()) return;
            const Barrier full = slots.is_full(slot);
            full.expect(call.chunk_bytes);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             shared_address(bytes) + slot * call.chunk_bytes),
                         "l"(next.address()), "r"(call.chunk_bytes), "r"(full.address)
                         : "memory");
            next.advance();
        };
        for (int slot = 0; slot < SLOTS; slot++) copy(slot);
        dependency_wait();
        if (call.trigger == LATE) dependency_launch();
        uint32_t word = 0, phase = 0;
        int slot = 0;
        for (uint64_t i = blockIdx.x; i < call.total; i += gridDim.x) {
            slots.is_full(slot).wait(phase);
            // No copy to this slot follows the last one, so nothing orders this read with one.
            if (i + gridDim.x >= call.total)
                word = *reinterpret_cast<const volatile uint32_t*>(bytes + slot * call.chunk_bytes);
            copy(slot);
            if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
        call.out[blockIdx.x] = word;
    }
}
EXPORT(ring_bulk)

// The same for pairs of blocks: each of the two copies half of a chunk, to both. Grid: an even number.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32) ring_multicast(Ring call) {
    DYNAMIC_SHARED(unsigned char, bytes);
    __shared__ Slots slots;
    const uint32_t rank = blockIdx.x % 2, pair = blockIdx.x / 2, pairs = gridDim.x / 2;
    auto meet = [] { asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory"); };
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) slots.is_full(slot).init(1), slots.is_empty(slot).init(2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    meet();
    if (threadIdx.x == 0) {
        Chunks next(call, pair, pairs);
        auto copy = [&](int slot) {
            const Barrier full = slots.is_full(slot);
            const int half = call.chunk_bytes / 2;
            full.expect(call.chunk_bytes);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                         "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(bytes) + slot * call.chunk_bytes + rank * half),
                         "l"(next.address() + rank * half), "r"(half), "r"(full.address), "h"(uint16_t(3))
                         : "memory");
            next.advance();
        };
        for (int slot = 0; slot < SLOTS && next.exists(); slot++) copy(slot);
        dependency_wait();
        uint32_t word = 0, phase = 0;
        int slot = 0;
        for (uint64_t i = pair; i < call.total; i += pairs) {
            slots.is_full(slot).wait(phase);
            if (i + pairs >= call.total)
                word = *reinterpret_cast<const volatile uint32_t*>(bytes + slot * call.chunk_bytes);
            // The slot may be written again when both blocks have received this chunk.
            for (uint32_t block = 0; block < 2; block++) slots.is_empty(slot).arrive(block);
            if (next.exists()) {
                slots.is_empty(slot).wait(phase);
                copy(slot);
            }
            if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
        call.out[blockIdx.x] = word;
    }
    __syncwarp();
    meet();  // no block ends while the other one arrives at its barriers
}
EXPORT(ring_multicast)
#endif
