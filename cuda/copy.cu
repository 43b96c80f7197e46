// Copies of rows and of cache blocks.
//
//     gather_rows    out[i] = x[rows[i]]
//     copy_blocks    to[part][copy.to] = from[part][copy.from]   for every copy and every part (a layer)
//
// Data      Rows are multiples of 4 bytes and blocks multiples of 16. The blocks of a cache have a part in every
//           layer; in the device's cache the parts of a layer are adjacent, [layer][block], in the host tier those of
//           a block, [block][layer]. Strides describe both, so one kernel saves (device to pinned host memory), loads
//           and swaps. The copies of a launch are independent: none reads a block that another one writes.
// Shape     gather_rows: one block per row. copy_blocks: grid (copies, layers).
// Limit     bytes; across PCIe its bandwidth: 16-byte accesses, consecutive threads at consecutive addresses.
#include "common.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
gather_rows(const uint32_t* __restrict__ x, const uint32_t* __restrict__ rows, uint32_t* __restrict__ out, int words) {
    dependency_wait();
    dependency_launch();
    const uint32_t* from = x + size_t(rows[blockIdx.x]) * words;
    uint32_t* to = out + size_t(blockIdx.x) * words;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += THREADS) to[i] = from[i];
}
EXPORT(gather_rows)

// Numbers of 16-byte words from one block, and from one layer, to the next.
struct BlockStrides {
    uint64_t block, layer;
};
struct BlockCopy {
    uint32_t from, to;
};

extern "C" __global__ void __launch_bounds__(THREADS)
copy_blocks(const uint4* __restrict__ from, BlockStrides from_strides, uint4* __restrict__ to, BlockStrides to_strides,
            const BlockCopy* __restrict__ copies, int words) {
    dependency_wait();
    dependency_launch();
    const BlockCopy copy = copies[blockIdx.x];
    const uint4* source = from + copy.from * from_strides.block + blockIdx.y * from_strides.layer;
    uint4* target = to + copy.to * to_strides.block + blockIdx.y * to_strides.layer;
#pragma unroll 4
    for (int i = threadIdx.x; i < words; i += THREADS) target[i] = source[i];
}
EXPORT(copy_blocks)
