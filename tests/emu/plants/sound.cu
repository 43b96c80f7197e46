// Kernels without defects, for the tests of the emulator.
#include "common.cuh"
#if defined(PENSTOCK_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WARPGROUPS
#include "warpgroup.cuh"
#endif

extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    dependency_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
EXPORT(saxpy)

struct Vectors {
    const float *x, *y;
    float* sum;
};
extern "C" __global__ void add_vectors(Vectors v, int n) {
    dependency_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) v.sum[i] = v.x[i] + v.y[i];
}
EXPORT(add_vectors)

// A dependent launch may begin before its predecessor has ended; the caller chooses whether it waits.
extern "C" __global__ void scale(float a, float* y, int n, int waits) {
    if (waits) dependency_wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] *= a;
}
EXPORT(scale)

// out[row] = the sum of a row, in blocks of whole warps.
extern "C" __global__ void row_sums(const float* x, float* out, int width) {
    __shared__ float partial[32];
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[blockIdx.x * width + i];
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
EXPORT(row_sums)

// The same with dynamic shared memory: an element per thread.
extern "C" __global__ void row_sums_dynamic(const float* x, float* out, int width) {
    DYNAMIC_SHARED(float, partial);
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[blockIdx.x * width + i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        if (int(threadIdx.x) < step) partial[threadIdx.x] += partial[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}
EXPORT(row_sums_dynamic)

// Copies n stages of 16 bytes per thread through shared memory, the next stage in flight. Neighbours exchange their
// values, so the copies of other threads are read.
extern "C" __global__ void staged_copy(const float* in, float* out, int n) {
    __shared__ __align__(16) float stages[2][128 * 4];
    const int width = blockDim.x * 4, own = threadIdx.x * 4, other = (threadIdx.x ^ 1) * 4;
    copy_async<16>(&stages[0][own], in + own);
    copy_commit();
    for (int i = 0; i < n; i++) {
        if (i + 1 < n) copy_async<16>(&stages[(i + 1) % 2][own], in + (i + 1) * width + own);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        for (int j = 0; j < 4; j++) out[i * width + own + j] = stages[i % 2][other + j];
        __syncthreads();
    }
}
EXPORT(staged_copy)

extern "C" __global__ void histogram(const unsigned* values, unsigned* counts, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&counts[values[i] % 16], 1u);
}
EXPORT(histogram)

// d = a * b for one tile, a of 16 x 16 and b of 16 x 8 (column major).
template <class T>
DEVICE void multiply_tile(const T* a, const T* b, float* d) {
    const int lane = threadIdx.x, group = lane / 4, quad = lane % 4;
    auto pair = [](const T* p) { return *reinterpret_cast<const uint32_t*>(p); };
    const uint32_t rows[4] = {pair(a + group * 16 + quad * 2), pair(a + (group + 8) * 16 + quad * 2),
                              pair(a + group * 16 + quad * 2 + 8), pair(a + (group + 8) * 16 + quad * 2 + 8)};
    const uint32_t columns[2] = {pair(b + group * 16 + quad * 2), pair(b + group * 16 + quad * 2 + 8)};
    float sums[4] = {};
    mma<T>(sums, rows, columns);
    for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + quad * 2 + i % 2] = sums[i];
}
extern "C" __global__ void multiply_bf16(const bf16* a, const bf16* b, float* d) { multiply_tile(a, b, d); }
EXPORT(multiply_bf16)
extern "C" __global__ void multiply_f16(const f16* a, const f16* b, float* d) { multiply_tile(a, b, d); }
EXPORT(multiply_f16)

// The same for bytes, a of 16 x 32 or 16 x 16 (A = 4 or 2 registers).
template <int A, class Sum, class Multiply>
DEVICE void multiply_byte_tile(const uint32_t* a, const uint32_t* b, Sum* d, Multiply multiply) {
    const int lane = threadIdx.x, group = lane / 4, quad = lane % 4, pitch = 2 * A;
    uint32_t rows[A], columns[A / 2];
    for (int i = 0; i < A; i++) rows[i] = a[(group + i % 2 * 8) * pitch + i / 2 * 4 + quad];
    for (int i = 0; i < A / 2; i++) columns[i] = b[group * pitch + i * 4 + quad];
    Sum sums[4] = {};
    multiply(sums, rows, columns);
    for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + quad * 2 + i % 2] = sums[i];
}
#define MULTIPLY(NAME, A, SUM, MMA)                                                                      \
    extern "C" __global__ void multiply_##NAME(const uint32_t* a, const uint32_t* b, SUM* d) {           \
        multiply_byte_tile<A>(a, b, d, [](auto& sums, auto& x, auto& y) { MMA(sums, x, y); });           \
    }                                                                                                    \
    EXPORT(multiply_##NAME)
MULTIPLY(int8_16, 2, int, mma_int8)
MULTIPLY(int8_32, 4, int, mma_int8)
MULTIPLY(fp8_32, 4, float, mma_fp8)

#ifdef HAS_WARPGROUPS
// d = a * b for tiles of 64 x 64 and 32 x 64, both by rows, by a warpgroup. Dynamic shared memory: both, swizzled.
template <class T>
DEVICE void multiply_tiles(const T* a, const T* b, float* d) {
    uint4* const tile = first_tile();
    uint4* const other = tile + 64 * TILE_WORDS;
    for (int i = threadIdx.x; i < 96 * TILE_WORDS; i += blockDim.x) {
        const int row = i / TILE_WORDS, word = i % TILE_WORDS;
        const T* from = row < 64 ? a + row * TILE_COLUMNS : b + (row - 64) * TILE_COLUMNS;
        tile[row * TILE_WORDS + (word ^ row % 8)] = reinterpret_cast<const uint4*>(from)[word];
    }
    products_see_writes();
    __syncthreads();
    float sums[4][4] = {};
    begin_products();
    for (int part = 0; part < 4; part++) multiply<T, 32>(sums, tile, other, part);
    commit_products();
    wait_for_products<0>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int j = 0; j < 4; j++)
        for (int e = 0; e < 4; e++)
            d[(warp * 16 + lane / 4 + e / 2 * 8) * 32 + j * 8 + lane % 4 * 2 + e % 2] = sums[j][e];
}
extern "C" __global__ void multiply_tiles_bf16(const bf16* a, const bf16* b, float* d) { multiply_tiles(a, b, d); }
EXPORT(multiply_tiles_bf16)
extern "C" __global__ void multiply_tiles_f16(const f16* a, const f16* b, float* d) { multiply_tiles(a, b, d); }
EXPORT(multiply_tiles_f16)

// The same with `a` in registers, and `b` of 64 rows; all in words of 4 bytes.
template <class T, class Sum>
DEVICE void multiply_registers(const uint32_t* a, const uint32_t* b, Sum* d) {
    uint4* const tile = first_tile();
    for (int i = threadIdx.x; i < 64 * TILE_WORDS; i += blockDim.x) {
        const int row = i / TILE_WORDS, word = i % TILE_WORDS;
        tile[row * TILE_WORDS + (word ^ row % 8)] = reinterpret_cast<const uint4*>(b)[i];
    }
    products_see_writes();
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t operands[4][4];
    for (int part = 0; part < 4; part++)
        for (int r = 0; r < 4; r++)
            operands[part][r] = a[(warp * 16 + lane / 4 + r % 2 * 8) * 32 + part * 8 + r / 2 * 4 + lane % 4];
    Sum sums[8][4];
    begin_products();
    for (int part = 0; part < 4; part++) multiply<T>(sums, operands[part], tile, part, part > 0);
    commit_products();
    wait_for_products<0>();
    keep_registers(sums);
    keep_registers(operands);
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 4; e++)
            d[(warp * 16 + lane / 4 + e / 2 * 8) * 64 + j * 8 + lane % 4 * 2 + e % 2] = sums[j][e];
}
extern "C" __global__ void multiply_registers_bf16(const uint32_t* a, const uint32_t* b, float* d) {
    multiply_registers<bf16>(a, b, d);
}
EXPORT(multiply_registers_bf16)
extern "C" __global__ void multiply_registers_f16(const uint32_t* a, const uint32_t* b, float* d) {
    multiply_registers<f16>(a, b, d);
}
EXPORT(multiply_registers_f16)
extern "C" __global__ void multiply_registers_int8(const uint32_t* a, const uint32_t* b, int* d) {
    multiply_registers<int8_t>(a, b, d);
}
EXPORT(multiply_registers_int8)
#endif

// out[lane][i] = the fragment of matrix i, of four transposed matrices of 8 x 8.
extern "C" __global__ void transpose_tiles(const uint4* in, uint32_t* out) {
    __shared__ uint4 rows[32];
    rows[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    uint32_t fragments[4];
    load_matrices_transposed(fragments, &rows[threadIdx.x]);
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = fragments[i];
}
EXPORT(transpose_tiles)

// Shuffles and votes of each lane, in segments of `width` lanes.
extern "C" __global__ void exchanges(unsigned* out, int width) {
    const unsigned lane = threadIdx.x, all = 0xffffffffu;
    unsigned* own = out + lane * 8;
    own[0] = __shfl_sync(all, lane, 3, width);
    own[1] = __shfl_xor_sync(all, lane, 5, width);
    own[2] = __shfl_down_sync(all, lane, 2, width);
    own[3] = __shfl_up_sync(all, lane, 2, width);
    own[4] = __ballot_sync(all, lane % 3 == 0);
    own[5] = __any_sync(all, lane == 7);
    own[6] = __all_sync(all, lane < 32);
    own[7] = lane < 8 ? __shfl_xor_sync(0xffu, lane, 1) : 99;
}
EXPORT(exchanges)

// Every thread writes its indices.
extern "C" __global__ void indices(unsigned* out) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * threads + thread] = blockIdx.x | blockIdx.y << 4 | blockIdx.z << 8 | threadIdx.x << 12 |
                                    threadIdx.y << 20 | threadIdx.z << 28;
}
EXPORT(indices)

// For measurements: n operations of each kind.
extern "C" __global__ void nothing(int n) {}
EXPORT(nothing)
extern "C" __global__ void warp_syncs(int n) {
    for (int i = 0; i < n; i++) __syncwarp();
}
EXPORT(warp_syncs)
extern "C" __global__ void barriers(int n) {
    for (int i = 0; i < n; i++) __syncthreads();
}
EXPORT(barriers)
