// Copies of rows and of cache blocks.
//
//     gather_rows    out[i] = x[rows[i]]
//     copy_blocks    to[part][copy.to] = from[part][copy.from]   for every copy and every part (a layer)
//
// Data      Rows are multiples of 4 bytes (gather_halves: of 2) and blocks multiples of 16. The blocks of a cache have
//           a part in every layer; in the device's cache the parts of a layer are adjacent, [layer][block], in the host
//           tier those of a block, [block][layer]. Strides describe both, so one kernel saves (device to pinned host
//           memory), loads and swaps. The copies of a launch are independent: none reads a block that another one
//           writes.
// Shape     gather_*: one block per row. copy_blocks: grid (copies, layers).
// Limit     bytes; across PCIe its bandwidth: consecutive threads at consecutive addresses, 16 bytes each, or those of
//           a word if rows are not multiples of 16.
#include "common.cuh"

constexpr int THREADS = 256;

template <class Word>
DEVICE void copy_words(const Word* from, Word* to, int words) {
    transform(from, to, words, [](const Word& word, int) { return word; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather_rows(const uint32_t* x, const uint32_t* rows, uint32_t* out, int words) {
    dependency_wait();
    dependency_launch();
    const uint32_t* from = x + size_t(rows[blockIdx.x]) * words;
    uint32_t* to = out + size_t(blockIdx.x) * words;
    if (words % 4 == 0)
        copy_words(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), words / 4);
    else
        copy_words(from, to, words);
}
EXPORT(gather_rows)

extern "C" __global__ void __launch_bounds__(THREADS)
gather_halves(const uint16_t* x, const uint32_t* rows, uint16_t* out, int halves) {
    dependency_wait();
    dependency_launch();
    copy_words(x + size_t(rows[blockIdx.x]) * halves, out + size_t(blockIdx.x) * halves, halves);
}
EXPORT(gather_halves)

// Numbers of 16-byte words from one block, and from one layer, to the next.
struct BlockStrides {
    uint64_t block, layer;
};
struct BlockCopy {
    uint32_t from, to;
};

extern "C" __global__ void __launch_bounds__(THREADS)
copy_blocks(const uint4* from, BlockStrides from_strides, uint4* to, BlockStrides to_strides,
            const BlockCopy* copies, int words) {
    dependency_wait();
    dependency_launch();
    const BlockCopy copy = copies[blockIdx.x];
    copy_words(from + copy.from * from_strides.block + blockIdx.y * from_strides.layer,
               to + copy.to * to_strides.block + blockIdx.y * to_strides.layer, words);
}
EXPORT(copy_blocks)
