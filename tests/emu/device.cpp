// Initialisation, the device and its primary context.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>
#include "driver.h"

namespace emu {

const Library* library;
Shadow shadow;
thread_local CUctx_st* current_context;
static CUctx_st primary_context;
static pid_t initialised_by = 0;

bool is_initialised() { return initialised_by == getpid(); }

// The kernels: EMU_KERNELS, or libkernels.so beside this library.
static std::string kernels_path() {
    if (const char* path = getenv("EMU_KERNELS")) return path;
    Dl_info own;
    dladdr(reinterpret_cast<void*>(kernels_path), &own);
    const std::string path = own.dli_fname;
    return path.substr(0, path.rfind('/') + 1) + "libkernels.so";
}

static bool load_library() {
    void* handle = dlopen(kernels_path().c_str(), RTLD_NOW | RTLD_LOCAL);
    void* function = handle ? dlsym(handle, "emu_library") : nullptr;
    if (!function) {
        fprintf(stderr, "emu: no kernels: %s\n", dlerror());
        return false;
    }
    library = reinterpret_cast<const Library* (*)()>(function)();
    return true;
}

static void report_leaks() {
    for (const auto& leaks : {memory_objects(), stream_objects(), module_objects(), graph_objects()})
        for (const Leak& leak : leaks)
            if (leak.count) findings.add("leak at the release of the context", std::to_string(leak.count) + " " + leak.kind);
}

// At the end of a process that has used the device: appends its findings to the file EMU_FINDINGS, and a line that
// shows that they are complete.
static void write_findings() {
    const char* path = getenv("EMU_FINDINGS");
    FILE* file = path && is_initialised() ? fopen(path, "a") : nullptr;
    if (!file) return;
    if (primary_context.references) findings.add("leak at the end of the process", "the context");
    fprintf(file, "%send of the process\n", findings.text().c_str());
    fclose(file);
}

}  // namespace emu

using namespace emu;

extern "C" {

CUresult cuInit(unsigned flags) {
    // The child of a fork cannot use the device; state_mutex may have been locked at the fork.
    if (initialised_by && !is_initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    ENTER(NOTHING);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (!settings.is_enabled) return CUDA_ERROR_NO_DEVICE;
    Guard guard(state_mutex);
    if (initialised_by) return CUDA_SUCCESS;
    if (!load_library()) return CUDA_ERROR_OPERATING_SYSTEM;
    reserve_memory();
    install_fault_handler();
    atexit(write_findings);
    initialised_by = getpid();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    ENTER(NOTHING);
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** name) {
    *name = nullptr;
    for (const ErrorName& known : ERROR_NAMES)
        if (known.code == code) *name = known.name;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char** text) { return cuGetErrorName(code, text); }

CUresult cuDeviceGetCount(int* count) {
    ENTER(INITIALISATION);
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(int* device, int ordinal) {
    ENTER(INITIALISATION);
    if (ordinal) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, int device) {
    ENTER(INITIALISATION);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, size, "Emulated device");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid_st* uuid, int device) {
    ENTER(INITIALISATION);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, "emulated-device", sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid_st* uuid, int device) {
    ENTER(INITIALISATION);
    return cuDeviceGetUuid_v2(uuid, device);
}

CUresult cuDeviceGetPCIBusId(char* text, int size, int device) {
    ENTER(INITIALISATION);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, size, "0000:00:00.0");
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, int device) {
    ENTER(INITIALISATION);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = settings.memory;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute_enum attribute, int device) {
    ENTER(INITIALISATION);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    static const std::map<int, int> values = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, settings.architecture / 10},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, settings.architecture % 10},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, int(most_shared_bytes())},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 4 << 20},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 128},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7fffffff},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
        {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 0},
        {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0},
        {CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0},
        {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0},
    };
    const auto found = values.find(attribute);
    if (found == values.end()) {
        findings.add("the emulator does not know an attribute of the device", std::to_string(attribute));
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    *value = found->second;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUctx_st** context, int device) {
    ENTER(INITIALISATION);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    Guard guard(state_mutex);
    primary_context.references++;
    *context = &primary_context;
    return CUDA_SUCCESS;
}

// The last release frees all that is left. That is a leak, except after a sticky error, when no call can free anything.
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(INITIALISATION);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    {
        Guard guard(state_mutex);
        if (!primary_context.references) return CUDA_ERROR_INVALID_CONTEXT;
        if (--primary_context.references) return CUDA_SUCCESS;
        if (!sticky()) report_leaks();
    }
    free_stream_objects();
    Guard guard(state_mutex);
    free_memory_objects(), free_module_objects(), free_graph_objects();
    sticky_error = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUctx_st* context) {
    ENTER(INITIALISATION);
    if (context && context != &primary_context) return CUDA_ERROR_INVALID_CONTEXT;
    current_context = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUctx_st** context) {
    ENTER(INITIALISATION);
    *context = current_context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER(CONTEXT);
    *least = 0, *greatest = -5;
    return CUDA_SUCCESS;
}

// NVRTC loads the driver, and asks for tables of functions that are not documented; without one it does not use the
// driver.
CUresult cuGetExportTable(const void** table, const CUuuid_st*) {
    *table = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
