// Every function over buffers of exactly their size, at any alignment: what is read or written
// outside them is found by AddressSanitizer, and each CRC is compared with a plain one.
#include "../baton_copy.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

std::mt19937_64 draw;

uint64_t below(uint64_t bound) {
    return draw() % bound;
}

uint32_t plain(const uint8_t* data, uint64_t size) {
    uint32_t crc = 0xffffffffu;
    for (uint64_t i = 0; i < size; ++i) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ ((crc & 1u) ? 0x82f63b78u : 0u);
        }
    }
    return ~crc;
}

void require(bool holds, const char* what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

std::vector<uint8_t> bytes(uint64_t size) {
    std::vector<uint8_t> made(size);
    for (auto& byte : made) {
        byte = static_cast<uint8_t>(draw());
    }
    return made;
}

void copy() {
    const uint64_t size = below(4) == 0 ? below(90000) : below(200), skip = below(33);
    const auto source = bytes(size + skip);
    std::vector<uint8_t> target(size + skip);
    const uint64_t cut = size == 0 ? 0 : below(size + 1);
    uint32_t crc = bc_copy_crc32c(0, target.data() + skip, source.data(), cut);
    crc = bc_copy_crc32c(crc, target.data() + skip + cut, source.data() + cut, size - cut);
    require(crc == plain(source.data(), size), "the copy's CRC");
    require(std::equal(source.begin(), source.begin() + static_cast<int64_t>(size),
                       target.begin() + static_cast<int64_t>(skip)),
            "the copy");
    require(bc_crc32c(0, source.data(), size) == crc, "the CRC");
}

void scatter() {
    const uint64_t piece = 1 + below(30000), whole = below(4), last = 1 + below(piece);
    const uint64_t count = whole + 1, total = whole * piece + last;
    const auto source = bytes(total);
    std::vector<uint8_t> target(count * piece);
    std::vector<uint64_t> offsets(count);
    for (uint64_t i = 0; i < count; ++i) {
        offsets[i] = (count - 1 - i) * piece;
    }
    std::vector<uint32_t> crcs(count);
    const auto call = [&] {
        return bc_scatter(target.data(), target.size(), offsets.data(), count, source.data(), total,
                          piece, crcs.data());
    };
    require(call() == 0, "a scatter");
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t size = i + 1 == count ? last : piece;
        require(crcs[i] == plain(source.data() + i * piece, size), "a piece's CRC");
        require(crcs[i] == plain(target.data() + offsets[i], size), "a piece");
    }
    std::vector<uint32_t> again(count);
    require(bc_crc32c_at(target.data(), target.size(), offsets.data(), count, piece,
                         again.data()) == 0,
            "CRCs in place");
    require(count == 1 || again[0] == crcs[0], "a CRC in place");
    offsets[below(count)] = below(2) == 0 ? ~uint64_t{0} - below(9) : target.size();
    require(call() == BC_OUT_OF_BOUNDS, "an offset outside");
    require(bc_scatter(target.data(), target.size(), offsets.data(), count + 1, source.data(),
                       total, piece, crcs.data()) == BC_BAD_ARGUMENT,
            "a count that does not fit");
}

void slots() {
    const uint64_t block = 1 + below(20), groups = 1 + below(4);
    std::vector<uint64_t> rows(groups), piece(groups);
    uint64_t total = 0;
    for (uint64_t g = 0; g < groups; ++g) {
        rows[g] = below(6);
        piece[g] = 1 + below(300);
        total += rows[g] * piece[g] * block;
    }
    const auto page = bytes(total);
    const uint64_t first = below(block), count = 1 + below(block - first);
    std::vector<uint32_t> crcs(count);
    const auto call = [&](uint64_t size, uint64_t slot) {
        return bc_slot_crcs(page.data(), size, block, rows.data(), piece.data(), groups, slot,
                            count, crcs.data());
    };
    if (total == 0) {
        return;
    }
    require(call(total, first) == 0, "slots");
    for (uint64_t i = 0; i < count; ++i) {
        std::vector<uint8_t> content;
        const uint8_t* group = page.data();
        for (uint64_t g = 0; g < groups; ++g) {
            for (uint64_t row = 0; row < rows[g]; ++row) {
                const uint8_t* at = group + (row * block + first + i) * piece[g];
                content.insert(content.end(), at, at + piece[g]);
            }
            group += rows[g] * piece[g] * block;
        }
        require(crcs[i] == plain(content.data(), content.size()), "a slot's CRC");
    }
    require(call(total - 1, first) == BC_OUT_OF_BOUNDS, "a page that is too short");
    require(call(total, block - count + 1) == BC_OUT_OF_BOUNDS, "slots outside the page");
    rows[0] = ~uint64_t{0} / 2;
    require(call(total, first) == BC_OUT_OF_BOUNDS, "rows outside the page");
}

}  // namespace

int main(int argc, char** argv) {
    draw.seed(argc > 1 ? strtoull(argv[1], nullptr, 10) : 1);
    const uint64_t rounds = argc > 2 ? strtoull(argv[2], nullptr, 10) : 300;
    for (uint64_t round = 0; round < rounds; ++round) {
        copy();
        scatter();
        slots();
    }
    puts("ok");
    return 0;
}
