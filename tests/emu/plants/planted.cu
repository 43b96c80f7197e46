// Kernels with one defect each, which the emulator must report.
#include "common.cuh"
#include "warpgroup.cuh"

extern "C" __global__ void sums_without_barrier(const float* x, float* out, int width) {
    __shared__ float partial[32];
    dependency_wait();
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[blockIdx.x * width + i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    // __syncthreads() is missing.
    if (threadIdx.x == 0) {
        for (int i = 1; i < int(blockDim.x) / 32; i++) sum += partial[i];
        out[blockIdx.x] = sum;
    }
}
EXPORT(sums_without_barrier)

extern "C" __global__ void exchange_without_syncwarp(const float* x, float* out) {
    __shared__ float values[32];
    values[threadIdx.x] = x[threadIdx.x];
    const float other = __shfl_sync(0xffffffffu, x[threadIdx.x], 0);  // does not order memory
    out[threadIdx.x] = values[threadIdx.x ^ 1] + other;
}
EXPORT(exchange_without_syncwarp)

extern "C" __global__ void copy_without_wait(const float* in, float* out) {
    __shared__ __align__(16) float stage[128];
    copy_async<16>(&stage[threadIdx.x * 4], in + threadIdx.x * 4);
    copy_commit();
    for (int j = 0; j < 4; j++) out[threadIdx.x * 4 + j] = stage[threadIdx.x * 4 + j];
    copy_wait<0>();
}
EXPORT(copy_without_wait)

extern "C" __global__ void copy_into_used_stage(const float* in, float* out) {
    __shared__ __align__(16) float stage[128];
    const int own = threadIdx.x * 4, other = (threadIdx.x ^ 1) * 4;
    copy_async<16>(&stage[own], in + own);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    for (int j = 0; j < 4; j++) out[own + j] = stage[other + j];
    // __syncthreads() is missing: other threads still read the stage.
    copy_async<16>(&stage[own], in + own);
    copy_commit();
    __syncthreads();
    copy_wait<0>();
}
EXPORT(copy_into_used_stage)

extern "C" __global__ void copy_left_pending(const float* in) {
    __shared__ __align__(16) float stage[128];
    copy_async<16>(&stage[threadIdx.x * 4], in + threadIdx.x * 4);
    copy_commit();
}
EXPORT(copy_left_pending)

// A tile of 64 rows, all zeros, in dynamic shared memory.
DEVICE uint4* zero_tile() {
    uint4* const tile = first_tile();
    for (int i = threadIdx.x; i < 64 * TILE_WORDS; i += blockDim.x) tile[i] = {0, 0, 0, 0};
    products_see_writes();
    __syncthreads();
    return tile;
}

template <bool IS_SEEN_LATE>
DEVICE void multiply_unseen_tile() {
    uint4* tile = zero_tile();
    tile[threadIdx.x] = {0, 0, 0, 0};  // products_see_writes is missing, or behind the barrier
    __syncthreads();
    if (IS_SEEN_LATE) products_see_writes();
    float sums[4][4] = {};
    begin_products();
    multiply<bf16, 32>(sums, tile, tile, 0);
    commit_products();
    wait_for_products<0>();
}
extern "C" __global__ void product_of_unseen_tile() { multiply_unseen_tile<false>(); }
EXPORT(product_of_unseen_tile)
extern "C" __global__ void product_of_tile_seen_late() { multiply_unseen_tile<true>(); }
EXPORT(product_of_tile_seen_late)

extern "C" __global__ void product_without_begin() {
    const uint4* tile = zero_tile();
    float sums[4][4] = {};
    multiply<bf16, 32>(sums, tile, tile, 0);
    commit_products();
    wait_for_products<0>();
}
EXPORT(product_without_begin)

extern "C" __global__ void product_left_pending() {
    const uint4* tile = zero_tile();
    float sums[4][4] = {};
    begin_products();
    multiply<bf16, 32>(sums, tile, tile, 0);
    commit_products();
}
EXPORT(product_left_pending)

extern "C" __global__ void product_of_used_tile() {
    uint4* tile = zero_tile();
    float sums[4][4] = {};
    begin_products();
    multiply<bf16, 32>(sums, tile, tile, 0);
    commit_products();
    tile[threadIdx.x] = {0, 0, 0, 0};  // wait_for_products and __syncthreads() are missing
    wait_for_products<0>();
}
EXPORT(product_of_used_tile)

extern "C" __global__ void product_of_used_registers() {
    const uint4* tile = zero_tile();
    int sums[8][4] = {};
    uint32_t operand[4] = {};
    begin_products();
    multiply<bf16>(sums, operand, tile, 0, true);
    commit_products();
    operand[0] = 1;  // wait_for_products is missing
    wait_for_products<0>();
}
EXPORT(product_of_used_registers)

extern "C" __global__ void copy_misaligned(const float* in) {
    __shared__ __align__(16) float stage[128];
    copy_async<16>(&stage[1], in);
}
EXPORT(copy_misaligned)

extern "C" __global__ void read_misaligned(const float* in, float* out) {
    const float4 x = *reinterpret_cast<const float4*>(in + 1);
    out[0] = x.x + x.y + x.z + x.w;
}
EXPORT(read_misaligned)

extern "C" __global__ void write_misaligned(const float* in, float* out) {
    *reinterpret_cast<float2*>(out + 1) = {in[0], in[1]};
}
EXPORT(write_misaligned)

extern "C" __global__ void shared_out_of_bounds(float* out) {
    DYNAMIC_SHARED(float, values);
    values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x + 1];  // the last thread reads behind the end
}
EXPORT(shared_out_of_bounds)

extern "C" __global__ void shared_never_written(float* out) {
    DYNAMIC_SHARED(float, values);
    out[threadIdx.x] = values[threadIdx.x];
}
EXPORT(shared_never_written)

extern "C" __global__ void histogram_without_atomics(const unsigned* values, unsigned* counts, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) counts[values[i] % 16]++;
}
EXPORT(histogram_without_atomics)

extern "C" __global__ void divergent_barrier(float* out) {
    dependency_wait();
    if (threadIdx.x < 32) {
        __syncthreads();
        out[threadIdx.x] = 1;
    } else {
        out[threadIdx.x] = 2;
        __syncthreads();
    }
}
EXPORT(divergent_barrier)

// The next kernel would begin, and overlap with the kernel before this one.
extern "C" __global__ void launch_before_wait(float* out) {
    dependency_launch();
    dependency_wait();
    out[threadIdx.x] = 1;
}
EXPORT(launch_before_wait)

extern "C" __global__ void block_without_wait(float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    dependency_wait();
    out[i] = 1;
}
EXPORT(block_without_wait)

extern "C" __global__ void divergent_shuffle(float* out) {
    out[threadIdx.x] = threadIdx.x < 16 ? __shfl_sync(0xffffffffu, 1.0f, 0) : warp_sum(1.0f);
}
EXPORT(divergent_shuffle)

extern "C" __global__ void lane_outside_of_mask(unsigned* out) {
    out[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, 0);
}
EXPORT(lane_outside_of_mask)

extern "C" __global__ void shuffle_from_absent_lane(unsigned* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, 20);
}
EXPORT(shuffle_from_absent_lane)

// Lane 0 waits for its warp, and the other lanes for the block.
extern "C" __global__ void deadlock(float* out) {
    if (threadIdx.x == 0) __syncwarp();
    else __syncthreads();
    out[threadIdx.x] = 1;
}
EXPORT(deadlock)

__device__ __noinline__ int depth(volatile int* values, int n) {
    volatile int own[256];
    own[n % 256] = values[0];
    return n == 0 ? own[0] : depth(own, n - 1) + own[n % 256];
}
extern "C" __global__ void deep_recursion(int* out, int n) { out[0] = depth(out, n); }
EXPORT(deep_recursion)
