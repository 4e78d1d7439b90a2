// Reading memory as fast as plain code can: the floor that benchmarks compare a step with.
#include <cstring>

#include "baton_step.h"

uint64_t bt_read_all(const void* data, uint64_t bytes) {
    constexpr int kLanes = 16;
    uint64_t sums[kLanes] = {};
    const char* p = static_cast<const char*>(data);
    for (uint64_t at = 0; at + sizeof sums <= bytes; at += sizeof sums) {
        uint64_t words[kLanes];
        memcpy(words, p + at, sizeof words);
        for (int i = 0; i < kLanes; ++i) {
            sums[i] += words[i];
        }
    }
    uint64_t sum = 0;
    for (const uint64_t part : sums) {
        sum += part;
    }
    return sum;
}
