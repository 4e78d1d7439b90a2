// Segments by seed, whole, cut and flipped, through every function, each in a heap buffer of
// exactly its size: what is read or written outside it is found by AddressSanitizer.
#include "../baton_log.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

std::mt19937_64 draw;

uint64_t below(uint64_t bound) {
    return draw() % bound;
}

std::vector<uint8_t> unsealed(uint64_t records) {
    std::vector<uint8_t> bytes;
    for (uint64_t i = 0; i < records; ++i) {
        const uint32_t payload = static_cast<uint32_t>(below(3) == 0 ? below(700) : 64);
        const uint64_t whole = 64 + (payload + 63) / 64 * 64;
        const uint64_t at = bytes.size();
        bytes.resize(at + whole);
        uint8_t* p = bytes.data() + at;
        memcpy(p, "BLR1", 4);
        p[4] = 1;
        p[5] = static_cast<uint8_t>(below(20) == 0 ? 0x80 + below(100) : 1 + below(15));
        p[8] = static_cast<uint8_t>(below(5));
        memcpy(p + 48, &payload, 4);
        for (uint32_t k = 0; k < payload; ++k) {
            p[64 + k] = static_cast<uint8_t>(draw());
        }
    }
    return bytes;
}

void scan(const std::vector<uint8_t>& bytes, uint32_t chain, uint64_t expected) {
    const uint64_t capacity = bytes.size() / 64 + 1;
    uint64_t slot_count = 2;
    while (slot_count / 2 < capacity) {
        slot_count *= 2;
    }
    std::vector<bl_row> rows(capacity);
    std::vector<uint32_t> slots(slot_count);
    bl_scan out{};
    uint64_t room = below(2) == 0 ? capacity : below(capacity) + 1;
    do {
        const uint32_t before = out.row_count > 0 ? out.chain_crc : chain;
        const int32_t status =
            bl_scan_records(bytes.data(), bytes.size(), out.end_offset, before, 1, rows.data(),
                            room, slots.data(), slot_count, &out);
        if (status != 0) {
            printf("refused with %d\n", status);
            exit(1);
        }
        room = capacity;
    } while (out.stop == BL_FULL);
    if (expected != UINT64_MAX && (out.row_count != expected || out.stop != BL_END)) {
        printf("%llu rows, stop %u\n", static_cast<unsigned long long>(out.row_count), out.stop);
        exit(1);
    }
    for (uint64_t at = 0; at < bytes.size();) {
        const int64_t found = bl_find_record(bytes.data(), bytes.size(), at);
        if (found < 0) {
            exit(1);
        }
        at = static_cast<uint64_t>(found) + 64;
    }
}

}  // namespace

int main(int count, char** words) {
    const int rounds = count > 1 ? atoi(words[1]) : 100;
    draw.seed(count > 2 ? strtoull(words[2], nullptr, 10) : 1);
    for (int round = 0; round < rounds; ++round) {
        const uint64_t records = 1 + below(40);
        std::vector<uint8_t> bytes = unsealed(records);
        const uint64_t missing = 64 * below(bytes.size() / 64);
        std::vector<uint8_t> cut(bytes.begin(), bytes.end() - static_cast<long>(missing));
        uint32_t chain = 7;
        if (!cut.empty()) {
            bl_seal_records(cut.data(), cut.size(), 1, &chain);
        }
        chain = 7;
        const int64_t sealed = bl_seal_records(bytes.data(), bytes.size(), 1, &chain);
        if (sealed != static_cast<int64_t>(records)) {
            puts("not sealed");
            return 1;
        }
        scan(bytes, 7, records);
        for (int k = 0; k < 8; ++k) {
            const long present = static_cast<long>(below(bytes.size()) + 1);
            std::vector<uint8_t> hurt(bytes.begin(), bytes.begin() + present);
            hurt.shrink_to_fit();
            for (uint64_t flips = below(3); flips > 0; --flips) {
                hurt[below(hurt.size())] ^= static_cast<uint8_t>(1u << below(8));
            }
            scan(hurt, 7, UINT64_MAX);
        }
    }
    printf("%d rounds, no fault\n", rounds);
    return 0;
}
