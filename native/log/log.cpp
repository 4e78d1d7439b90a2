#include "baton_log.h"

#include <cstddef>
#include <cstring>

#include "../src/crc32c.hpp"

namespace {

constexpr uint64_t kHeaderBytes = 64;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kChainedBytes = 56;
constexpr uint64_t kCrcOffset = 60;
constexpr uint32_t kPayloadMax = 32u << 20;
constexpr uint8_t kVersion = 1;
constexpr uint8_t kLastType = 15;
constexpr uint8_t kSkippable = 0x80;
constexpr uint8_t kMagic[4] = {'B', 'L', 'R', '1'};

static_assert(sizeof(bl_row) == 64, "rows are read by their offsets");
static_assert(sizeof(bl_scan) == 32, "the result is read by its offsets");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian");

template <typename T>
T load(const uint8_t* p) {
    T value;
    memcpy(&value, p, sizeof(value));
    return value;
}

template <typename T>
void store(uint8_t* p, T value) {
    memcpy(p, &value, sizeof(value));
}

uint32_t mask(uint32_t crc) {
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

uint64_t record_bytes(uint32_t payload_bytes) {
    return kHeaderBytes + (uint64_t{payload_bytes} + kAlignment - 1) / kAlignment * kAlignment;
}

bool is_zero(const uint8_t* p, uint64_t bytes) {
    uint64_t seen = 0;
    for (; bytes >= 64; p += 64, bytes -= 64) {
        for (uint64_t i = 0; i < 64; i += 8) {
            seen |= load<uint64_t>(p + i);
        }
        if (seen != 0) {
            return false;
        }
    }
    for (; bytes > 0; ++p, --bytes) {
        seen |= *p;
    }
    return seen == 0;
}

uint32_t next_chain(uint32_t chain, const uint8_t* header) {
    uint8_t before[4];
    store(before, chain);
    return bt::crc32c(bt::crc32c(0, before, sizeof(before)), header, kChainedBytes);
}

// Everything about the header at `p` that needs no other byte. `p` has 64 bytes.
bl_stop check_header(const uint8_t* p) {
    if (memcmp(p, kMagic, sizeof(kMagic)) != 0) {
        return BL_MAGIC;
    }
    if (mask(bt::crc32c(0, p, kCrcOffset)) != load<uint32_t>(p + kCrcOffset)) {
        return BL_HEADER_CRC;
    }
    if (p[4] != kVersion) {
        return BL_VERSION;
    }
    const uint8_t type = p[5];
    const bool is_known = type >= 1 && type <= kLastType;
    if (!is_known && (type & kSkippable) == 0) {
        return BL_TYPE;
    }
    if (is_known && (load<uint16_t>(p + 6) != 0 || load<uint32_t>(p + 44) != 0)) {
        return BL_FLAGS;
    }
    if (load<uint32_t>(p + 48) > kPayloadMax) {
        return BL_PAYLOAD_BYTES;
    }
    return BL_END;
}

// The payload of a record whose header was checked. `bytes` are present from `p` on.
bl_stop check_payload(const uint8_t* p, uint64_t bytes) {
    const uint32_t payload_bytes = load<uint32_t>(p + 48);
    const uint64_t whole = record_bytes(payload_bytes);
    if (whole > bytes) {
        return BL_PAYLOAD;
    }
    if (bt::crc32c(0, p + kHeaderBytes, payload_bytes) != load<uint32_t>(p + 52)) {
        return BL_PAYLOAD_CRC;
    }
    const uint64_t used = kHeaderBytes + payload_bytes;
    return is_zero(p + used, whole - used) ? BL_END : BL_PADDING;
}

// Numbers of log ids: an open hash table of (row index + 1) of the id's first row.
struct Numbers {
    uint32_t* slots;
    uint64_t mask;
    const bl_row* rows;
    uint32_t count;

    uint32_t number_of(const uint8_t* log_id, uint64_t row_index) {
        uint64_t hash = load<uint64_t>(log_id) ^ (load<uint64_t>(log_id + 8) * 0x9e3779b97f4a7c15u);
        hash = (hash ^ (hash >> 32)) * 0xd6e8feb86659fd93u;
        for (uint64_t at = (hash ^ (hash >> 32)) & mask;; at = (at + 1) & mask) {
            if (slots[at] == 0) {
                slots[at] = static_cast<uint32_t>(row_index + 1);
                return count++;
            }
            const bl_row& first = rows[slots[at] - 1];
            if (memcmp(first.log_id, log_id, sizeof(first.log_id)) == 0) {
                return first.log;
            }
        }
    }
};

void fill_row(bl_row* row, const uint8_t* p, uint64_t offset) {
    memset(row, 0, sizeof(*row));
    row->offset = offset;
    row->lsn = load<uint64_t>(p + 24);
    row->generation = load<uint64_t>(p + 32);
    memcpy(row->log_id, p + 8, sizeof(row->log_id));
    row->position = load<uint32_t>(p + 40);
    row->payload_bytes = load<uint32_t>(p + 48);
    row->chain_crc = load<uint32_t>(p + 56);
    row->flags = load<uint16_t>(p + 6);
    row->type_code = p[5];
}

bool is_power_of_two(uint64_t value) {
    return value != 0 && (value & (value - 1)) == 0;
}

}  // namespace

extern "C" {

uint32_t bl_abi_version(void) {
    return BL_ABI_VERSION;
}

uint32_t bl_crc32c(uint32_t crc, const uint8_t* data, uint64_t size) {
    return data == nullptr ? crc : bt::crc32c(crc, data, size);
}

int32_t bl_scan_records(const uint8_t* data, uint64_t size, uint64_t offset, uint32_t chain_crc,
                        uint32_t is_chain_known, struct bl_row* rows, uint64_t row_capacity,
                        uint32_t* slots, uint64_t slot_count, struct bl_scan* out) {
    if (data == nullptr || rows == nullptr || slots == nullptr || out == nullptr ||
        offset > size || offset % kAlignment != 0 || row_capacity >= UINT32_MAX ||
        out->row_count > row_capacity || out->log_count > out->row_count ||
        !is_power_of_two(slot_count) || slot_count / 2 < row_capacity) {
        return BL_BAD_ARGUMENT;
    }
    Numbers numbers{slots, slot_count - 1, rows, out->log_count};
    uint64_t count = out->row_count;
    uint32_t chain = chain_crc;
    bool is_known = is_chain_known != 0;
    bl_stop stop = BL_END;
    while (offset < size) {
        const uint8_t* p = data + offset;
        if (size - offset < kHeaderBytes) {
            stop = BL_HEADER;
            break;
        }
        stop = check_header(p);
        if (stop != BL_END) {
            break;
        }
        const uint32_t stated = load<uint32_t>(p + 56);
        if (is_known && next_chain(chain, p) != stated) {
            stop = BL_CHAIN_CRC;
            break;
        }
        stop = check_payload(p, size - offset);
        if (stop != BL_END) {
            break;
        }
        if (count == row_capacity) {
            stop = BL_FULL;
            break;
        }
        fill_row(&rows[count], p, offset);
        rows[count].log = numbers.number_of(rows[count].log_id, count);
        ++count;
        chain = stated;
        is_known = true;
        offset += record_bytes(load<uint32_t>(p + 48));
    }
    if (stop != BL_END && stop != BL_FULL && is_zero(data + offset, size - offset)) {
        stop = BL_END;
    }
    out->end_offset = offset;
    out->row_count = count;
    out->log_count = numbers.count;
    out->chain_crc = chain;
    out->stop = static_cast<uint32_t>(stop);
    out->zero = 0;
    return 0;
}

int64_t bl_find_record(const uint8_t* data, uint64_t size, uint64_t offset) {
    if (data == nullptr || offset % kAlignment != 0 || size > INT64_MAX) {
        return BL_BAD_ARGUMENT;
    }
    for (; offset < size && size - offset >= kHeaderBytes; offset += kAlignment) {
        const uint8_t* p = data + offset;
        if (check_header(p) == BL_END && check_payload(p, size - offset) == BL_END) {
            return static_cast<int64_t>(offset);
        }
    }
    return static_cast<int64_t>(size);
}

int64_t bl_seal_records(uint8_t* data, uint64_t size, uint64_t first_lsn, uint32_t* chain_crc) {
    if (data == nullptr || chain_crc == nullptr || size % kAlignment != 0) {
        return BL_BAD_ARGUMENT;
    }
    uint32_t chain = *chain_crc;
    int64_t count = 0;
    for (uint64_t offset = 0; offset < size; ++count) {
        uint8_t* p = data + offset;
        const uint32_t payload_bytes = load<uint32_t>(p + 48);
        if (memcmp(p, kMagic, sizeof(kMagic)) != 0 || payload_bytes > kPayloadMax ||
            record_bytes(payload_bytes) > size - offset) {
            return BL_BAD_RECORD;
        }
        store(p + 24, first_lsn + static_cast<uint64_t>(count));
        store(p + 52, bt::crc32c(0, p + kHeaderBytes, payload_bytes));
        chain = next_chain(chain, p);
        store(p + 56, chain);
        store(p + kCrcOffset, mask(bt::crc32c(0, p, kCrcOffset)));
        offset += record_bytes(payload_bytes);
    }
    *chain_crc = chain;
    return count;
}

}  // extern "C"
