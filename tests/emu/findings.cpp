// The list of findings, and the translation of program counters to lines.
#include "findings.h"
#include <cstdio>
#include <cstring>
#include <dlfcn.h>

namespace emu {

Findings findings;

void Findings::add(const std::string& kind, const std::string& details) {
    const std::string text = kind + ": " + details;
    std::lock_guard<std::mutex> guard(mutex);
    if (texts.size() < LIMIT && keys.insert(text).second) texts.push_back(text);
}

bool Findings::is_new(const std::string& key) {
    std::lock_guard<std::mutex> guard(mutex);
    return texts.size() < LIMIT && keys.insert(key).second;
}

std::string Findings::text() {
    std::lock_guard<std::mutex> guard(mutex);
    std::string all;
    for (const std::string& text : texts) all += text + "\n";
    return all;
}

size_t Findings::count() {
    std::lock_guard<std::mutex> guard(mutex);
    return texts.size();
}

void Findings::clear() {
    std::lock_guard<std::mutex> guard(mutex);
    texts.clear(), keys.clear();
}

// True for files whose functions are inlined into kernels: the caller's line is of more use.
static bool is_helper(const std::string& line) {
    for (const char* file : {"warp.h", "shim.h", "observe.h", "instrument.cpp", "common.cuh"})
        if (!line.compare(0, strlen(file), file)) return true;
    return false;
}

std::string place(void* pc) {
    Dl_info info;
    if (!pc || !dladdr(pc, &info)) return "";
    char command[600], buffer[400];
    const size_t offset = static_cast<char*>(pc) - static_cast<char*>(info.dli_fbase) - 1;  // in the call
    snprintf(command, sizeof command, "addr2line -s -i -e '%s' %zx 2>/dev/null", info.dli_fname, offset);
    std::string found;
    if (FILE* output = popen(command, "r")) {
        // The innermost function is the first.
        while (fgets(buffer, sizeof buffer, output)) {
            buffer[strcspn(buffer, " \n")] = 0;
            if (found.empty() || is_helper(found)) found = buffer;
        }
        pclose(output);
    }
    return found.empty() ? "" : " at " + found;
}

}  // namespace emu
