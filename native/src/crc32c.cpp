#include "crc32c.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace bt {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // Castagnoli, reflected

struct Tables {
    uint32_t by_byte[8][256];
};

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1u) ? kPolynomial : 0u);
        }
        tables.by_byte[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; ++i) {
        for (int t = 1; t < 8; ++t) {
            const uint32_t before = tables.by_byte[t - 1][i];
            tables.by_byte[t][i] = (before >> 8) ^ tables.by_byte[0][before & 0xffu];
        }
    }
    return tables;
}

constexpr Tables kTables = make_tables();

[[maybe_unused]] uint32_t by_table(uint32_t crc, const uint8_t* p, size_t bytes) {
    const auto& t = kTables.by_byte;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = t[7][low & 0xff] ^ t[6][(low >> 8) & 0xff] ^ t[5][(low >> 16) & 0xff] ^
              t[4][low >> 24] ^ t[3][high & 0xff] ^ t[2][(high >> 8) & 0xff] ^
              t[1][(high >> 16) & 0xff] ^ t[0][high >> 24];
    }
    for (; bytes > 0; ++p, --bytes) {
        crc = (crc >> 8) ^ t[0][(crc ^ *p) & 0xff];
    }
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const uint8_t* p,
                                                          size_t bytes) {
    uint64_t wide = crc;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = static_cast<uint32_t>(wide);
    for (; bytes > 0; ++p, --bytes) {
        crc = _mm_crc32_u8(crc, *p);
    }
    return crc;
}
#elif defined(__ARM_FEATURE_CRC32)
uint32_t by_instruction(uint32_t crc, const uint8_t* p, size_t bytes) {
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        crc = __crc32cd(crc, word);
    }
    for (; bytes > 0; ++p, --bytes) {
        crc = __crc32cb(crc, *p);
    }
    return crc;
}
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
    const uint8_t* p = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    return has_instruction ? ~by_instruction(~crc, p, bytes) : ~by_table(~crc, p, bytes);
#elif defined(__ARM_FEATURE_CRC32)
    return ~by_instruction(~crc, p, bytes);
#else
    return ~by_table(~crc, p, bytes);
#endif
}

}  // namespace bt
