// A driver for the tests of finding a device. Environment variables choose its answers.

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
int variable(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}
int status(const char* name) { return variable(name, 0); }
int count() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return visible && !*visible ? 0 : variable("FAKE_COUNT", 1);
}
void* current = nullptr;
int retained = 0;
}  // namespace

extern "C" {
int cuInit(unsigned) {
    if (const int error = status("FAKE_INIT")) return error;
    return count() ? 0 : 100;
}
int cuDriverGetVersion(int* version) {
    *version = variable("FAKE_VERSION", 13000);
    return status("FAKE_VERSION_STATUS");
}
int cuGetErrorName(int code, const char** name) {
    *name = code == 999 ? "CUDA_ERROR_UNKNOWN" : code == 46 ? "CUDA_ERROR_DEVICE_UNAVAILABLE" : nullptr;
    return *name ? 0 : 1;
}
int cuGetErrorString(int, const char** text) {
    *text = nullptr;
    return 1;
}
int cuDeviceGetCount(int* number) {
    *number = count();
    return status("FAKE_COUNT_STATUS");
}
int cuDeviceGet(int* device, int index) {
    *device = index;
    return 0;
}
int cuDeviceGetName(char* name, int length, int) {
    // Without a terminating null character, if the name is long.
    std::strncpy(name, std::getenv("FAKE_NAME") ? std::getenv("FAKE_NAME") : "Fake GPU", length);
    return 0;
}
#ifndef WITHOUT_UUID
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i * 16 + device;
    return 0;
}
#endif
int cuDeviceGetPCIBusId(char* address, int length, int device) {
    std::snprintf(address, length, "0001:%02X:00.0", 0x1a + device);
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (device == variable("FAKE_LOST", -1)) return 719;
    switch (attribute) {
        case 16: *value = 132; return 0;  // multiprocessors
        case 75: *value = variable("FAKE_CAPABILITY", 90) / 10; return 0;
        case 76: *value = variable("FAKE_CAPABILITY", 90) % 10; return 0;
        default: return 1;
    }
}
int cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = size_t(80) << 30;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
    if (const int error = status("FAKE_RETAIN")) return error;
    retained++;
    *context = &retained;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) {
    if (current == &retained) std::abort();  // It is still current.
    retained--;
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = current;
    return 0;
}
int cuCtxSetCurrent(void* context) {
    current = context;
    return 0;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
    if (current != &retained || retained != 1) return 201;
    *free = size_t(79) << 30;
    *total = size_t(80) << 30;
    return status("FAKE_MEMORY");
}
}
