// Linked into every library of kernels: its list of kernels, and the functions that it exports (abi.h).
#include <cstring>
#include "shim.h"

namespace emu {

const Entry* entries;

static const Kernel* find(const char* name) {
    for (const Entry* e = entries; e; e = e->next)
        if (!strcmp(e->name, name)) return e;
    return nullptr;
}

}  // namespace emu

const emu::Library* emu_library() {
#ifdef EMU_INSTRUMENTED
    constexpr bool is_instrumented = true;
#else
    constexpr bool is_instrumented = false;
#endif
    static const emu::Library library = {emu::find, emu::run, emu::abandon, is_instrumented};
    return &library;
}

const char* emu_launch(const char* name, const unsigned grid[3], const unsigned block[3], uint64_t first,
                       unsigned shared, void** arguments) {
    const emu::Kernel* kernel = emu::find(name);
    return kernel ? emu::launch(kernel, grid, block, first, shared, arguments) : "no such kernel; is its EXPORT missing?";
}
