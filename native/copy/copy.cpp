// One pass over the bytes: three CRC streams side by side, because the instruction takes three
// cycles and can start every cycle, and stores that go past the cache, because a page just written
// is next read by another process.
#include "baton_copy.h"

#include <cstddef>
#include <cstring>

#include "../src/crc32c.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__x86_64__)

constexpr uint32_t kPolynomial = 0x82f63b78u;  // Castagnoli, reflected
constexpr size_t kStream = 4096;               // bytes of one of the three streams
constexpr size_t kBlock = 3 * kStream;
constexpr size_t kLine = 64;

// a * b modulo the polynomial, bits reflected.
constexpr uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit) {
            sum ^= b;
        }
        b = (b & 1u) ? (b >> 1) ^ kPolynomial : b >> 1;
    }
    return sum;
}

// x to the power of `bits`.
constexpr uint32_t power(uint64_t bits) {
    uint32_t result = 1u << 31, base = 1u << 30;
    for (; bits != 0; bits >>= 1) {
        if (bits & 1u) {
            result = product(base, result);
        }
        base = product(base, base);
    }
    return result;
}

// What a CRC becomes when `bytes` zeros follow, one table per byte of it.
struct Shift {
    uint32_t by_byte[4][256];
};

constexpr Shift make_shift(uint64_t bytes) {
    Shift shift{};
    const uint32_t factor = power(bytes * 8);
    for (int at = 0; at < 4; ++at) {
        for (uint32_t i = 0; i < 256; ++i) {
            shift.by_byte[at][i] = product(factor, i << (8 * at));
        }
    }
    return shift;
}

constexpr Shift kOne = make_shift(kStream);
constexpr Shift kTwo = make_shift(2 * kStream);

uint32_t shifted(const Shift& shift, uint32_t crc) {
    const auto& t = shift.by_byte;
    return t[0][crc & 0xff] ^ t[1][(crc >> 8) & 0xff] ^ t[2][(crc >> 16) & 0xff] ^ t[3][crc >> 24];
}

uint64_t word(const uint8_t* p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

void stream_line(uint8_t* target, const uint8_t* source) {
    for (size_t i = 0; i < kLine; i += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
    }
}

// Whole blocks; `target` is aligned to a line. The CRC is the register's, not inverted.
template <bool copies>
__attribute__((target("sse4.2"))) uint32_t blocks(uint32_t crc, uint8_t* target,
                                                  const uint8_t* source, size_t count) {
    for (; count > 0; --count, source += kBlock) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < kStream; i += kLine) {
            // Word by word in turn: the CPU looks only a few CRCs ahead.
            for (size_t at = i; at < i + kLine; at += 8) {
                a = _mm_crc32_u64(a, word(source + at));
                b = _mm_crc32_u64(b, word(source + kStream + at));
                c = _mm_crc32_u64(c, word(source + 2 * kStream + at));
            }
            if constexpr (copies) {
                stream_line(target + i, source + i);
                stream_line(target + kStream + i, source + kStream + i);
                stream_line(target + 2 * kStream + i, source + 2 * kStream + i);
            }
        }
        crc = shifted(kTwo, static_cast<uint32_t>(a)) ^ shifted(kOne, static_cast<uint32_t>(b)) ^
              static_cast<uint32_t>(c);
        if constexpr (copies) {
            target += kBlock;
        }
    }
    if constexpr (copies) {
        _mm_sfence();
    }
    return crc;
}

bool is_fast() {
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    return has_instruction;
}

#endif

// In pieces that stay in the cache between the two passes.
uint32_t copy_in_cache(uint32_t crc, uint8_t* target, const uint8_t* source, size_t size) {
    constexpr size_t kPiece = 16384;
    while (size > 0) {
        const size_t piece = size < kPiece ? size : kPiece;
        crc = bt::crc32c(crc, source, piece);
        memcpy(target, source, piece);
        target += piece;
        source += piece;
        size -= piece;
    }
    return crc;
}

uint32_t crc_of(uint32_t crc, const uint8_t* data, size_t size) {
#if defined(__x86_64__)
    const size_t count = size / kBlock;
    if (count > 0 && is_fast()) {
        crc = ~blocks<false>(~crc, nullptr, data, count);
        data += count * kBlock;
        size -= count * kBlock;
    }
#endif
    return bt::crc32c(crc, data, size);
}

uint32_t copied(uint32_t crc, uint8_t* target, const uint8_t* source, size_t size) {
#if defined(__x86_64__)
    if (size >= 2 * kBlock && is_fast()) {
        // Whole lines only: one written in two parts goes to memory twice.
        const size_t head = (kLine - (reinterpret_cast<uintptr_t>(target) & (kLine - 1))) % kLine;
        crc = copy_in_cache(crc, target, source, head);
        const size_t whole = (size - head) / kBlock * kBlock;
        crc = ~blocks<true>(~crc, target + head, source + head, whole / kBlock);
        target += head + whole;
        source += head + whole;
        size -= head + whole;
    }
#endif
    return copy_in_cache(crc, target, source, size);
}

bool is_inside(const uint64_t* offsets, uint64_t count, uint64_t piece_bytes, uint64_t last_bytes,
               uint64_t bytes) {
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t piece = i + 1 == count ? last_bytes : piece_bytes;
        if (piece > bytes || offsets[i] > bytes - piece) {
            return false;
        }
    }
    return true;
}

}  // namespace

extern "C" {

uint32_t bc_abi_version(void) {
    return BC_ABI_VERSION;
}

uint32_t bc_crc32c(uint32_t crc, const uint8_t* data, uint64_t size) {
    return size == 0 ? crc : crc_of(crc, data, size);
}

uint32_t bc_copy_crc32c(uint32_t crc, uint8_t* target, const uint8_t* source, uint64_t size) {
    return size == 0 ? crc : copied(crc, target, source, size);
}

int32_t bc_scatter(uint8_t* target, uint64_t target_bytes, const uint64_t* offsets, uint64_t count,
                   const uint8_t* source, uint64_t source_bytes, uint64_t piece_bytes,
                   uint32_t* crcs) {
    if (count == 0) {
        return source_bytes == 0 ? 0 : BC_BAD_ARGUMENT;
    }
    if (target == nullptr || offsets == nullptr || source == nullptr || crcs == nullptr ||
        piece_bytes == 0 || source_bytes == 0 || (source_bytes - 1) / piece_bytes + 1 != count) {
        return BC_BAD_ARGUMENT;
    }
    const uint64_t last = source_bytes - (count - 1) * piece_bytes;
    if (!is_inside(offsets, count, piece_bytes, last, target_bytes)) {
        return BC_OUT_OF_BOUNDS;
    }
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t piece = i + 1 == count ? last : piece_bytes;
        crcs[i] = copied(0, target + offsets[i], source + i * piece_bytes, piece);
    }
    return 0;
}

int32_t bc_crc32c_at(const uint8_t* data, uint64_t data_bytes, const uint64_t* offsets,
                     uint64_t count, uint64_t piece_bytes, uint32_t* crcs) {
    if (count == 0) {
        return 0;
    }
    if (data == nullptr || offsets == nullptr || crcs == nullptr || piece_bytes == 0) {
        return BC_BAD_ARGUMENT;
    }
    if (!is_inside(offsets, count, piece_bytes, piece_bytes, data_bytes)) {
        return BC_OUT_OF_BOUNDS;
    }
    for (uint64_t i = 0; i < count; ++i) {
        crcs[i] = crc_of(0, data + offsets[i], piece_bytes);
    }
    return 0;
}

int32_t bc_slot_crcs(const uint8_t* page, uint64_t page_bytes, uint64_t block_tokens,
                     const uint64_t* rows, const uint64_t* row_bytes, uint64_t group_count,
                     uint64_t first_slot, uint64_t count, uint32_t* crcs) {
    if (count == 0) {
        return 0;
    }
    if (page == nullptr || rows == nullptr || row_bytes == nullptr || crcs == nullptr) {
        return BC_BAD_ARGUMENT;
    }
    if (count > block_tokens || first_slot > block_tokens - count) {
        return BC_OUT_OF_BOUNDS;
    }
    uint64_t left = page_bytes;
    for (uint64_t g = 0; g < group_count; ++g) {
        // Dividing, so that no product can run over.
        if (row_bytes[g] == 0 || rows[g] > left / row_bytes[g] / block_tokens) {
            return row_bytes[g] == 0 ? BC_BAD_ARGUMENT : BC_OUT_OF_BOUNDS;
        }
        left -= rows[g] * row_bytes[g] * block_tokens;
    }
    for (uint64_t i = 0; i < count; ++i) {
        const uint8_t* group = page;
        uint32_t crc = 0;
        for (uint64_t g = 0; g < group_count; ++g) {
            const uint64_t piece = row_bytes[g], stride = piece * block_tokens;
            const uint8_t* at = group + (first_slot + i) * piece;
            for (uint64_t row = 0; row < rows[g]; ++row, at += stride) {
                crc = bt::crc32c(crc, at, piece);
            }
            group += rows[g] * stride;
        }
        crcs[i] = crc;
    }
    return 0;
}

}  // extern "C"
