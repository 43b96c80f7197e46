// Modules and launches. A cubin names its kernels; their code is that of the host's library, found by name.
#include <cstdio>
#include <algorithm>
#include <cstring>
#include <elf.h>
#include "driver.h"

struct CUfunc_st {
    const emu::Kernel* kernel;
    unsigned static_shared = 0, max_threads = 1024;
    unsigned max_dynamic_shared = 48 << 10;
};

struct CUmod_st {
    std::map<std::string, CUfunc_st> functions;
};

namespace emu {

constexpr int CUDA_MACHINE = 190;  // of an ELF file

static std::set<CUmod_st*> modules;

// ------------------------------------------------------------------------------------------------------------ images

// The function of a kernel; null if the host's library lacks it.
static CUfunc_st* add_function(CUmod_st& module, const std::string& name) {
    const Kernel* kernel = library->find(name.c_str());
    if (kernel) return &(module.functions[name] = {kernel});
    findings.add("a kernel is not in the host's library; is its EXPORT missing?", name);
    return nullptr;
}

// A cubin in memory. Its size is not an argument, so the sections are only as trustworthy as the file.
class Cubin {
    const char* image;
    const Elf64_Ehdr* header;
    const Elf64_Shdr* sections;

    std::string name_of(const Elf64_Shdr& s) const {
        return image + sections[header->e_shstrndx].sh_offset + s.sh_name;
    }
    const Elf64_Shdr* find(const std::string& name) const {
        for (int i = 0; i < header->e_shnum; i++)
            if (name_of(sections[i]) == name) return &sections[i];
        return nullptr;
    }

  public:
    explicit Cubin(const char* bytes)
        : image(bytes), header(reinterpret_cast<const Elf64_Ehdr*>(bytes)),
          sections(reinterpret_cast<const Elf64_Shdr*>(bytes + header->e_shoff)) {}

    static bool is_cubin(const char* bytes) {
        return !memcmp(bytes, ELFMAG, SELFMAG) && reinterpret_cast<const Elf64_Ehdr*>(bytes)->e_machine == CUDA_MACHINE;
    }

    void load(CUmod_st& module) const {
        const std::string text = ".text.";
        for (int i = 0; i < header->e_shnum; i++) {
            const std::string name = name_of(sections[i]);
            if (name.compare(0, text.size(), text)) continue;
            const std::string kernel = name.substr(text.size());
            CUfunc_st* function = add_function(module, kernel);
            if (!function) continue;
            if (const Elf64_Shdr* shared = find(".nv.shared." + kernel)) {
                function->static_shared = unsigned(shared->sh_size);
                function->max_dynamic_shared -= std::min(function->static_shared, function->max_dynamic_shared);
            }
            if (const Elf64_Shdr* info = find(".nv.info." + kernel)) compare(*function, *info);
        }
    }

    // Compares the parameters in the cubin with those of the host's function. Entries of .nv.info: format, attribute,
    // and a size of 16 bits if the format is 4, which a payload follows.
    void compare(CUfunc_st& function, const Elf64_Shdr& info) const {
        constexpr uint8_t WITH_SIZE = 4, PARAMETER = 0x17, MAX_THREADS = 5;
        const Kernel& kernel = *function.kernel;
        unsigned num_parameters = 0;
        const char* end = image + info.sh_offset + info.sh_size;
        for (const char* entry = image + info.sh_offset; entry + 4 <= end;) {
            const uint8_t format = uint8_t(entry[0]), attribute = uint8_t(entry[1]);
            uint16_t size;
            memcpy(&size, entry + 2, sizeof size);
            const char* payload = entry + 4;
            entry = payload + (format == WITH_SIZE ? size : 0);
            if (format != WITH_SIZE || entry > end) continue;
            if (attribute == PARAMETER && size >= 12) {
                uint16_t ordinal;
                uint32_t word;
                memcpy(&ordinal, payload + 4, sizeof ordinal);
                memcpy(&word, payload + 8, sizeof word);
                num_parameters++;
                if (ordinal >= kernel.num_parameters || kernel.sizes[ordinal] != word >> 18)
                    findings.add("cubin and host disagree on a parameter", std::string(kernel.name) + " " + std::to_string(ordinal));
            } else if (attribute == MAX_THREADS && size >= 4) {
                memcpy(&function.max_threads, payload, sizeof function.max_threads);
            }
        }
        if (num_parameters != kernel.num_parameters)
            findings.add("cubin and host disagree on the number of parameters", kernel.name);
    }
};

std::vector<Leak> module_objects() { return {{"modules", modules.size()}}; }

void free_module_objects() {
    for (CUmod_st* module : modules) delete module;
    modules.clear();
}

// --------------------------------------------------------------------------------------------------------- launches

// Copies of the arguments of a launch.
struct Arguments {
    std::vector<uint64_t> words;
    std::vector<void*> pointers;
    std::vector<uintptr_t> addresses;  // those that are pointers to device memory

    Arguments(const Kernel& kernel, void** values) {
        size_t length = 0;
        for (unsigned i = 0; i < kernel.num_parameters; i++) length += (kernel.sizes[i] + 7) / 8;
        words.resize(length);
        uint64_t* to = words.data();
        for (unsigned i = 0; i < kernel.num_parameters; i++) {
            const size_t size = kernel.sizes[i], num_words = (size + 7) / 8;
            memcpy(to, values[i], size);
            // Pointers in a structure of arguments count, too.
            for (size_t w = 0; w < num_words; w++)
                if (is_device_address(to[w])) addresses.push_back(to[w]);
            pointers.push_back(to);
            to += num_words;
        }
    }
};

static void observe_access(const Access& access) { shadow.access(access); }
static void observe_block(const Observer& observer) { shadow.begin_block(observer); }
static void observe_fence(unsigned thread, unsigned interval) { shadow.products_see_writes(thread, interval); }

static CUresult run_kernel(const Kernel* kernel, Launch launch) {
    if (!launch.grid[0] || !launch.grid[1] || !launch.grid[2]) return CUDA_SUCCESS;  // without its only block
    if (settings.is_traced) fprintf(stderr, "kernel %s\n", kernel->name);
    Observer observer{};
    if (shadow.is_on) {
        observer.access = observe_access, observer.begin_block = observe_block, observer.is_pinned = is_pinned;
        observer.products_see_writes = observe_fence;
        device_range(observer.device, observer.device_end);
        launch.observer = &observer;
        shadow.begin_launch();
    }
    launch.recovered = restore_access;
    if (library->run(kernel, &launch)) return CUDA_SUCCESS;
    findings.add("kernel failed", launch.error + place(launch.failed_pc));
    return launch.failed_pc ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_LAUNCH_FAILED;
}

// The largest dimension has one block less.
static void remove_block(Launch& launch) {
    --*std::max_element(launch.grid, launch.grid + 3);
}

static CUresult launch_kernel(const CUlaunchConfig_st& c, CUfunc_st* f, void** values, bool is_dependent) {
    const uint64_t threads = uint64_t(c.blockDimX) * c.blockDimY * c.blockDimZ;
    if (!c.gridDimX || !c.gridDimY || !c.gridDimZ || c.gridDimX > 0x7fffffff || c.gridDimY > 65535 || c.gridDimZ > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    if (!threads || threads > 1024 || c.blockDimZ > 64) return CUDA_ERROR_INVALID_VALUE;
    if (threads > f->max_threads) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    if (c.sharedMemBytes > f->max_dynamic_shared || c.sharedMemBytes + f->static_shared > most_shared_bytes())
        return CUDA_ERROR_INVALID_VALUE;

    auto arguments = std::make_shared<Arguments>(*f->kernel, values);
    Launch launch{};
    launch.grid[0] = c.gridDimX, launch.grid[1] = c.gridDimY, launch.grid[2] = c.gridDimZ;
    if (Guard guard(state_mutex); is_planted("cuLaunchKernelEx")) remove_block(launch);
    launch.block[0] = c.blockDimX, launch.block[1] = c.blockDimY, launch.block[2] = c.blockDimZ;
    launch.shared = c.sharedMemBytes, launch.is_dependent = is_dependent;
    launch.arguments = arguments->pointers.data();

    Work work;
    work.name = f->kernel->name;
    work.addresses = arguments->addresses;
    work.is_dependent = is_dependent;
    work.task = [kernel = f->kernel, launch, arguments](const Doing&) { return run_kernel(kernel, launch); };
    if (is_counted_and_planted("launch"))
        work.task = [](const Doing&) { return CUDA_ERROR_ILLEGAL_ADDRESS; };
    return submit(c.hStream, std::move(work));
}

}  // namespace emu

using namespace emu;

extern "C" {

// The image is a cubin, or "EMU!" and names of kernels that each end with a zero; the last name is empty.
CUresult cuModuleLoadData(CUmod_st** result, const void* data) {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    const char* image = static_cast<const char*>(data);
    auto module = std::make_unique<CUmod_st>();
    if (Cubin::is_cubin(image)) {
        Cubin(image).load(*module);
    } else if (!memcmp(image, "EMU!", 4)) {
        for (const char* name = image + 4; *name; name += strlen(name) + 1) add_function(*module, name);
    } else {
        return CUDA_ERROR_INVALID_IMAGE;
    }
    Guard guard(state_mutex);
    modules.insert(*result = module.release());
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmod_st* module) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (!modules.erase(module)) return CUDA_ERROR_INVALID_HANDLE;
    delete module;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunc_st** function, CUmod_st* module, const char* name) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (!modules.count(module)) return CUDA_ERROR_INVALID_HANDLE;
    const auto found = module->functions.find(name);
    if (found == module->functions.end()) return CUDA_ERROR_NOT_FOUND;
    *function = &found->second;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute_enum attribute, CUfunc_st* f) {
    ENTER(CONTEXT);
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = int(f->max_threads); break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = int(f->static_shared); break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = int(f->max_dynamic_shared); break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS:
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: *value = 0; break;
        default:
            findings.add("the emulator does not know an attribute of a function", std::to_string(attribute));
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunc_st* f, CUfunction_attribute_enum attribute, int value) {
    ENTER(CONTEXT);
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_NOT_SUPPORTED;
    if (value < 0 || unsigned(value) + f->static_shared > most_shared_bytes()) return CUDA_ERROR_INVALID_VALUE;
    f->max_dynamic_shared = unsigned(value);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunc_st* f, size_t ordinal, size_t* offset, size_t* size) {
    ENTER(CONTEXT);
    const Kernel& kernel = *f->kernel;
    if (ordinal >= kernel.num_parameters) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    for (size_t i = 0; i <= ordinal; i++) {
        *size = kernel.sizes[i];
        const size_t alignment = *size & -*size;  // of numbers, pointers and vectors: a power of two
        *offset = (*offset + alignment - 1) / alignment * alignment;
        if (i < ordinal) *offset += *size;
    }
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunc_st* f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream_st* stream, void** values,
                        void** extra) {
    ENTER(CONTEXT);
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    const CUlaunchConfig_st config = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, nullptr, 0};
    return launch_kernel(config, f, values, false);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig_st* config, CUfunc_st* f, void** values, void** extra) {
    ENTER(CONTEXT);
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    bool is_dependent = false;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute_st& attribute = config->attrs[i];
        if (attribute.id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
            findings.add("the emulator does not know an attribute of a launch", std::to_string(attribute.id));
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        int value;
        memcpy(&value, attribute.value, sizeof value);
        is_dependent = value;
    }
    if (is_dependent) is_counted_and_planted("programmatic launch");
    return launch_kernel(*config, f, values, is_dependent);
}

}  // extern "C"
