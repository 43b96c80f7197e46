// Tokens of a step.
#pragma once
#include "common.cuh"

// A token FOLLOWS | slot is the last token of that slot, which the sampler of an earlier step left in `last_tokens`:
// the host has not seen it yet, so steps are launched one ahead.
constexpr uint32_t FOLLOWS = 1u << 31;

DEVICE uint32_t token_of(uint32_t token, const uint32_t* last_tokens) {
    return token & FOLLOWS ? last_tokens[token ^ FOLLOWS] : token;
}
