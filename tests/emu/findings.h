// The defects that the emulator has found, for tests to read through emuFindings.
#pragma once
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emu {

class Findings {
    static constexpr size_t LIMIT = 100;
    std::mutex mutex;
    std::vector<std::string> texts;
    std::set<std::string> keys;  // a defect is reported once

  public:
    void add(const std::string& kind, const std::string& details);
    // True if the defect with this key is to be reported: it is new, and the list is not full.
    bool is_new(const std::string& key);
    std::string text();
    size_t count();
    void clear();
};

extern Findings findings;

// " at file:line" of a program counter, by addr2line; empty if unknown.
std::string place(void* pc);

}  // namespace emu
