// The call of the probes that read memory through a ring of slots in shared memory.
#pragma once
#include "common.cuh"

// When a block allows the next kernel to become resident.
enum Trigger : int { NEVER, LATE, EARLY };

// Chunks of `from` are divided among the blocks, or pairs of blocks: chunk i, in turn, belongs to block i % blocks.
struct Ring {
    const uint8_t* from;
    uint32_t* out;          // the first word of the last chunk of each block
    uint64_t chunks;        // of `from`
    uint64_t total;         // chunks that are read; beyond `chunks`, from the first one on
    int chunk_bytes;        // of a slot: a multiple of 4096
    Trigger trigger;
};

// The chunks of a block, in turn.
struct Chunks {
    uint64_t index, step, place;
    const Ring& call;

    DEVICE Chunks(const Ring& call, uint32_t first, uint32_t step)
        : index(first), step(step), place(first % call.chunks), call(call) {}
    DEVICE bool exists() const { return index < call.total; }
    DEVICE const uint8_t* address() const { return call.from + place * call.chunk_bytes; }
    DEVICE void advance() {
        index += step;
        place += step;
        while (place >= call.chunks) place -= call.chunks;
    }
};
