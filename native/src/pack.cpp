#include "pack.hpp"

#include <cmath>
#include <cstring>

#include "baton_step.h"
#include "half.hpp"
#include "table.hpp"

namespace bt {
namespace {

constexpr int kQ80Bytes = 34;
constexpr int kQ41Bytes = 20;
// Column of a group of four that each byte of a dword holds.
constexpr int kByteColumn[4] = {0, 2, 1, 3};
constexpr int kByteOfColumn[4] = {0, 2, 1, 3};

// Where the two blocks begin that a block is one of.
size_t q8_pair_at(int block) {
    return static_cast<size_t>(block / 2) * kQ80TilePair;
}

float source_f32(const uint8_t* row, int column) {
    float value;
    memcpy(&value, row + sizeof value * static_cast<size_t>(column), sizeof value);
    return value;
}

// Where a signed byte of (row of the tile, column) stands in the byte area of a tile.
size_t byte_at(int lane, int column) {
    const int quad = column / 4;
    return static_cast<size_t>(quad) * 64 + static_cast<size_t>(lane) * 4 +
           static_cast<size_t>(kByteOfColumn[column % 4]);
}

void pack_f32(const uint8_t* row, int columns, int lane, uint8_t* tile) {
    for (int k = 0; k < columns; ++k) {
        memcpy(tile + (static_cast<size_t>(k) * kTileRows + static_cast<size_t>(lane)) * 4,
               row + static_cast<size_t>(k) * 4, 4);
    }
}

void pack_bf16(const uint8_t* row, int columns, int lane, uint8_t* tile) {
    for (int k = 0; k < columns; ++k) {
        const uint16_t half = float_bf16(source_f32(row, k));
        const size_t dword = static_cast<size_t>(k / 2) * kTileRows + static_cast<size_t>(lane);
        memcpy(tile + dword * 4 + static_cast<size_t>(k % 2) * 2, &half, sizeof half);
    }
}

void pack_int8(const uint8_t* row, int columns, int lane, uint8_t* tile) {
    float largest = 0;
    for (int k = 0; k < columns; ++k) {
        largest = std::fmax(largest, std::fabs(source_f32(row, k)));
    }
    const float scale = largest / 127.0f;
    memcpy(tile + static_cast<size_t>(lane) * 4, &scale, sizeof scale);
    for (int k = 0; k < columns; ++k) {
        const float steps = scale > 0 ? source_f32(row, k) / scale : 0.0f;
        const float bounded = std::fmin(std::fmax(std::nearbyintf(steps), -127.0f), 127.0f);
        const int8_t byte = static_cast<int8_t>(bounded);
        memcpy(tile + 64 + byte_at(lane, k), &byte, 1);
    }
}

void pack_q8_0(const uint8_t* row, int columns, int lane, uint8_t* tile) {
    for (int block = 0; block < columns / kBlock; ++block, row += kQ80Bytes) {
        uint8_t* pair = tile + q8_pair_at(block);
        const size_t half = static_cast<size_t>(block % 2);
        memcpy(pair + (half * kTileRows + static_cast<size_t>(lane)) * 2, row, 2);
        uint8_t* bytes = pair + 64 + half * kBlock * kTileRows;
        for (int k = 0; k < kBlock; ++k) {
            bytes[byte_at(lane, k)] = row[2 + k];
        }
    }
}

// Byte j of a GGUF block holds column j in its low nibble and column j + 16 in its high one.
uint8_t q4_nibble(const uint8_t* block, int column) {
    const uint8_t byte = block[4 + column % 16];
    return column < 16 ? byte & 0xf : byte >> 4;
}

void pack_q4_1(const uint8_t* row, int columns, int lane, uint8_t* tile) {
    const size_t at = static_cast<size_t>(lane);
    for (int block = 0; block < columns / kBlock;
         ++block, row += kQ41Bytes, tile += kQ41TileBlock) {
        for (int t = 0; t < 4; ++t) {
            for (int j = 0; j < 4; ++j) {
                const int column = 8 * t + kByteColumn[j];
                tile[static_cast<size_t>(t) * 64 + at * 4 + static_cast<size_t>(j)] =
                    static_cast<uint8_t>(q4_nibble(row, column) | q4_nibble(row, column + 4) << 4);
            }
        }
        memcpy(tile + 256 + at * 2, row, 2);
        memcpy(tile + 288 + at * 2, row + 2, 2);
    }
}

float unpack_q4_1(const uint8_t* tile, int lane, int column) {
    const uint8_t* block = tile + static_cast<size_t>(column / kBlock) * kQ41TileBlock;
    const int inside = column % kBlock;
    const size_t at = static_cast<size_t>(lane);
    const uint8_t byte = block[static_cast<size_t>(inside / 8) * 64 + at * 4 +
                               static_cast<size_t>(kByteOfColumn[inside % 4])];
    const int nibble = inside % 8 < 4 ? byte & 0xf : byte >> 4;
    uint16_t scale, minimum;
    memcpy(&scale, block + 256 + at * 2, 2);
    memcpy(&minimum, block + 288 + at * 2, 2);
    return static_cast<float>(nibble) * f16_float(scale) + f16_float(minimum);
}

float unpack_one(const Matrix& matrix, const uint8_t* tile, int lane, int column) {
    const size_t at = static_cast<size_t>(lane);
    float value = 0;
    uint16_t half = 0;
    switch (matrix.kind) {
        case BT_F32:
            memcpy(&value, tile + (static_cast<size_t>(column) * kTileRows + at) * 4, 4);
            return value;
        case BT_BF16:
            memcpy(&half,
                   tile + (static_cast<size_t>(column / 2) * kTileRows + at) * 4 +
                       static_cast<size_t>(column % 2) * 2,
                   2);
            return bf16_float(half);
        case BT_INT8:
            memcpy(&value, tile + at * 4, 4);
            return value *
                   static_cast<float>(static_cast<int8_t>(tile[64 + byte_at(lane, column)]));
        case BT_Q8_0: {
            const int block = column / kBlock;
            const uint8_t* pair = tile + q8_pair_at(block);
            const size_t part = static_cast<size_t>(block % 2);
            memcpy(&half, pair + (part * kTileRows + at) * 2, 2);
            const uint8_t* bytes = pair + 64 + part * kBlock * kTileRows;
            return f16_float(half) *
                   static_cast<float>(static_cast<int8_t>(bytes[byte_at(lane, column % kBlock)]));
        }
        default:
            return unpack_q4_1(tile, lane, column);
    }
}

}  // namespace

size_t tile_bytes(uint32_t kind, uint64_t columns) {
    const int blocks = static_cast<int>(columns / kBlock);
    const bool is_blocked = columns % kBlock == 0 && columns > 0;
    const bool is_paired = columns % 2 == 0 && columns > 0;
    switch (kind) {
        case BT_F32:
            return is_paired ? columns * kTileRows * 4 : 0;
        case BT_BF16:
            return is_paired ? columns * kTileRows * 2 : 0;
        case BT_INT8:
            return is_blocked ? 64 + columns * kTileRows : 0;
        case BT_Q8_0:
            return is_blocked ? q8_pair_at(blocks + 1) : 0;
        case BT_Q4_1:
            return is_blocked ? static_cast<size_t>(blocks) * kQ41TileBlock : 0;
        default:
            return 0;
    }
}

size_t source_row_bytes(uint32_t kind, uint64_t columns) {
    switch (kind) {
        case BT_Q8_0:
            return columns / kBlock * kQ80Bytes;
        case BT_Q4_1:
            return columns / kBlock * kQ41Bytes;
        default:
            return columns * 4;
    }
}

void pack_matrix(const Matrix& matrix, const uint8_t* source, uint8_t* target) {
    using Pack = void (*)(const uint8_t*, int, int, uint8_t*);
    static constexpr Pack kPack[kKinds] = {pack_f32, pack_bf16, pack_int8, pack_q8_0, pack_q4_1};
    const size_t row_bytes = source_row_bytes(matrix.kind, static_cast<uint64_t>(matrix.columns));
    memset(target, 0, matrix.tile_bytes * static_cast<size_t>(matrix.tiles));
    for (int row = 0; row < matrix.rows; ++row) {
        uint8_t* tile = target + matrix.tile_bytes * static_cast<size_t>(row / kTileRows);
        kPack[matrix.kind](source + row_bytes * static_cast<size_t>(row), matrix.columns,
                           row % kTileRows, tile);
    }
}

void unpack_row(const Matrix& matrix, int row, float* out) {
    const uint8_t* tile = matrix.data + matrix.tile_bytes * static_cast<size_t>(row / kTileRows);
    for (int k = 0; k < matrix.columns; ++k) {
        out[k] = unpack_one(matrix, tile, row % kTileRows, k);
    }
}

}  // namespace bt
