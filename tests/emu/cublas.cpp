// libemu_cublas.so, a stand-in for NVIDIA's cuBLASLt on the emulated driver: the functions that Penstock uses. A
// product is a launch of cublas_product.cu. A call that the real library would refuse, or with settings that Penstock
// does not use, is refused.
//
// EMU_CUBLAS_UNSUPPORTED=30  products of 30 rows have no algorithm; all: no product has one
// EMU_CUBLAS_FAULT=NAME      the function fails; NAME:3 from the third call on; capture: products that are captured
#include <cuda_api.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <initializer_list>

namespace {

using Status = int;
constexpr Status SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, INTERNAL_ERROR = 14, NOT_SUPPORTED = 15;
constexpr int COMPUTE_FLOAT32 = 68, FLOAT32 = 0, FLOAT16 = 2, BFLOAT16 = 14;
constexpr size_t ALIGNMENT = 16;

// The functions of the emulated driver, which the program has loaded.
struct Driver {
    decltype(&cuModuleLoadData) load;
    decltype(&cuModuleUnload) unload;
    decltype(&cuModuleGetFunction) function;
    decltype(&cuLaunchKernel) launch;
    decltype(&cuStreamIsCapturing) is_capturing;
};

struct Handle {
    Driver driver;
    CUmod_st* module;
    CUfunc_st* product;
};

struct Description {
    int transpose_a = 0, epilogue = 1;
    uint64_t bias = 0;
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t pitch;
};

struct Preference {
    size_t workspace = 0;
    uint32_t alignments[4] = {256, 256, 256, 256};
    uint32_t reductions = 7;
};

struct Algorithm {
    uint64_t workspace, alignment, rest[6];
};

struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
};

struct Product {
    uint64_t x, w, bias, out, workspace;
    int rows, outputs, inner, pitch, is_bf16;
    float beta;
};

// Whether this call fails.
bool is_planted(const char* function) {
    static std::atomic<int> calls{0};
    const char* fault = getenv("EMU_CUBLAS_FAULT");
    const size_t length = strlen(function);
    if (!fault || strncmp(fault, function, length)) return false;
    if (!fault[length]) return true;
    return fault[length] == ':' && ++calls >= atoi(fault + length + 1);
}

bool has_algorithm(uint64_t rows) {
    const char* value = getenv("EMU_CUBLAS_UNSUPPORTED");
    return !value || (strcmp(value, "all") && strtoull(value, nullptr, 10) != rows);
}

bool is_supported(const Description& d, const Layout& w, const Layout& x, const Layout& c, const Layout& out) {
    const bool is_half = w.type == x.type && (w.type == FLOAT16 || w.type == BFLOAT16);
    const bool fits = w.rows == x.rows && out.rows == w.columns && out.columns == x.columns;
    const bool has_pitches = w.pitch == int64_t(w.rows) && x.pitch == int64_t(x.rows) && out.pitch >= int64_t(out.rows);
    const bool is_aligned = 2 * w.pitch % ALIGNMENT == 0;
    return is_half && fits && has_pitches && is_aligned && d.transpose_a == 1 && &c == &out && out.type == FLOAT32 &&
           (d.epilogue == 1 || d.epilogue == 4);
}

template <class T>
Status create(T** object, T value) {
    *object = new T(value);
    return SUCCESS;
}

template <class T>
Status destroy(T* object) {
    delete object;
    return SUCCESS;
}

template <class T>
Status read(T& to, const void* from, size_t size) {
    if (size != sizeof(T)) return INVALID_VALUE;
    memcpy(&to, from, size);
    return SUCCESS;
}

}  // namespace

#define FAULT() \
    if (is_planted(__func__)) return INTERNAL_ERROR

extern "C" {

size_t cublasLtGetVersion() { return 131000; }

const char* cublasLtGetStatusName(Status status) {
    switch (status) {
        case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return nullptr;
    }
}

Status cublasLtCreate(Handle** handle) {
    FAULT();
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!library) return INTERNAL_ERROR;
    const auto find = [&](const char* name) { return dlsym(library, name); };
    Driver d;
    d.load = reinterpret_cast<decltype(d.load)>(find("cuModuleLoadData"));
    d.unload = reinterpret_cast<decltype(d.unload)>(find("cuModuleUnload"));
    d.function = reinterpret_cast<decltype(d.function)>(find("cuModuleGetFunction"));
    d.launch = reinterpret_cast<decltype(d.launch)>(find("cuLaunchKernel"));
    d.is_capturing = reinterpret_cast<decltype(d.is_capturing)>(find("cuStreamIsCapturing"));
    CUmod_st* module;
    CUfunc_st* product;
    if (d.load(&module, "EMU!cublas_product\0")) return INTERNAL_ERROR;
    if (d.function(&product, module, "cublas_product")) return INTERNAL_ERROR;
    return create(handle, Handle{d, module, product});
}

Status cublasLtDestroy(Handle* handle) {
    handle->driver.unload(handle->module);
    return destroy(handle);
}

Status cublasLtMatmulDescCreate(Description** description, int compute_type, int scale_type) {
    FAULT();
    if (compute_type != COMPUTE_FLOAT32 || scale_type != FLOAT32) return INVALID_VALUE;
    return create(description, Description{});
}

Status cublasLtMatmulDescSetAttribute(Description* description, int attribute, const void* value, size_t size) {
    FAULT();
    switch (attribute) {
        case 3: return read(description->transpose_a, value, size);
        case 7: return read(description->epilogue, value, size);
        case 8: return read(description->bias, value, size);
        default: return INVALID_VALUE;
    }
}

Status cublasLtMatmulDescDestroy(Description* description) { return destroy(description); }

Status cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t pitch) {
    FAULT();
    return create(layout, Layout{type, rows, columns, pitch});
}

Status cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout); }

Status cublasLtMatmulPreferenceCreate(Preference** preference) {
    FAULT();
    return create(preference, Preference{});
}

Status cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t size) {
    FAULT();
    if (attribute == 1) return read(preference->workspace, value, size);
    if (attribute == 3) return read(preference->reductions, value, size);
    if (attribute >= 5 && attribute <= 8) return read(preference->alignments[attribute - 5], value, size);
    return INVALID_VALUE;
}

Status cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }

Status cublasLtMatmulAlgoGetHeuristic(Handle*, Description* description, Layout* w, Layout* x, Layout* c, Layout* out,
                                      Preference* preference, int requested, Heuristic* results, int* count) {
    FAULT();
    *count = 0;
    if (requested < 1) return INVALID_VALUE;
    const auto [a, b, c_bytes, out_bytes] = preference->alignments;
    // The program promises no more.
    if (a > ALIGNMENT || b > ALIGNMENT || c_bytes > ALIGNMENT || c_bytes != out_bytes) return INVALID_VALUE;
    if (4 * out->pitch % out_bytes || preference->reductions & 1) return INVALID_VALUE;
    if (description->epilogue == 4 && description->bias % ALIGNMENT != out_bytes % ALIGNMENT) return INVALID_VALUE;
    if (!has_algorithm(x->columns) || !is_supported(*description, *w, *x, *c, *out)) return NOT_SUPPORTED;
    results[0] = {{sizeof(float), out_bytes, {}}, sizeof(float), SUCCESS, 1, {}};
    *count = 1;
    return preference->workspace < sizeof(float) ? NOT_SUPPORTED : SUCCESS;
}

Status cublasLtMatmul(Handle* handle, Description* description, const float* alpha, uint64_t w, Layout* w_layout,
                      uint64_t x, Layout* x_layout, const float* beta, uint64_t c, Layout* c_layout, uint64_t out,
                      Layout* out_layout, const Algorithm* algorithm, uint64_t workspace, size_t workspace_size,
                      CUstream_st* stream) {
    FAULT();
    if (!is_supported(*description, *w_layout, *x_layout, *c_layout, *out_layout)) return INVALID_VALUE;
    CUstreamCaptureStatus_enum status{};
    handle->driver.is_capturing(stream, &status);
    if (status != CU_STREAM_CAPTURE_STATUS_NONE && is_planted("capture")) return INTERNAL_ERROR;
    const uint64_t bias = description->epilogue == 4 ? description->bias : 0;
    if (*alpha != 1 || c != out || workspace_size < algorithm->workspace || !workspace) return INVALID_VALUE;
    for (const uint64_t address : {w, x, workspace})
        if (address % ALIGNMENT) return INVALID_VALUE;
    for (const uint64_t address : {out, bias})
        if (address % algorithm->alignment) return INVALID_VALUE;
    Product product = {x, w, bias, out, workspace, int(x_layout->columns), int(w_layout->columns), int(w_layout->rows),
                       int(out_layout->pitch), w_layout->type == BFLOAT16, *beta};
    void* arguments[] = {&product};
    const unsigned blocks = (unsigned(product.outputs) + 127) / 128;
    const unsigned rows = unsigned(product.rows);
    const CUresult error =
        handle->driver.launch(handle->product, blocks, rows, 1, 128, 1, 1, 0, stream, arguments, nullptr);
    return error ? EXECUTION_FAILED : SUCCESS;
}

}  // extern "C"
