// Hands an access of the running CUDA thread to the observer of its launch.
#pragma once
#include "runtime.h"

namespace emu {

struct AccessKind {
    bool is_write, is_atomic, is_pending, is_of_product = false;
};
constexpr AccessKind READ{false, false, false}, WRITE{true, false, false}, PENDING{true, false, true};
constexpr AccessKind ATOMIC_READ{false, true, false}, ATOMIC_WRITE{true, true, false};
constexpr AccessKind PRODUCT_READ{false, false, false, true};

inline __attribute__((always_inline)) void observe(const volatile void* pointer, size_t size, AccessKind kind,
                                                   void* pc) {
    Block* b = block;
    if (!b || !b->observer) return;
    const Observer& o = *b->observer;
    const uintptr_t p = reinterpret_cast<uintptr_t>(pointer);
    if (p - b->stacks < b->stacks_size) return;
    const bool is_observed = (p >= o.device && p < o.device_end) ||
                             (p >= o.dynamic_shared && p < o.dynamic_shared_end) ||
                             (p >= o.static_shared && p < o.static_shared_end);
    if (!is_observed) {
        if (pointer == &self || pointer == &block || is_private(p)) return;
        if (o.is_pinned(const_cast<const void*>(pointer), size)) return;
        fail_at(pc, "%s of host memory at %p", kind.is_write ? "write" : "read", const_cast<const void*>(pointer));
    }
    o.access({p, unsigned(size), kind.is_write, kind.is_atomic, kind.is_pending, kind.is_of_product,
              b->is_dependent && !self->has_waited, b->linear, self->linear, b->interval, self->warp->syncs, pc});
}

}  // namespace emu
