// What each instruction set offers the step: a table of functions over the same data layouts.
//
// Owns the layouts shared by packing, kernels and step. Matrices are cut into tiles of 16 rows, one
// vector lane per row, so that no kernel needs a horizontal sum and every ISA reads the same bytes:
//
//   F32   per column: 16 floats
//   BF16  per pair of columns: 16 dwords (low half the first column)
//   INT8  16 float row scales, then per 4 columns: 16 dwords of bytes
//   Q8_0  per two blocks of 32 columns: 2 x 16 f16 scales, 2 x 8 x 16 dwords of bytes (1088 bytes)
//   Q4_1  per block of 32: 4 x 16 dwords of nibbles, 16 f16 scales, 16 f16 minima (320 bytes)
//
// Scales stand right before or behind their numbers: read from elsewhere, even from the same page,
// they break the CPU's recognition of the stream, at a quarter of the speed.
// Bytes b0..b3 of a dword hold columns k, k+2, k+1, k+3, so that the even and the odd bytes widened
// to 16 bits are pairs of neighbours; a Q4_1 dword holds eight columns, low nibbles first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bt {

constexpr int kTileRows = 16;
constexpr int kBlock = 32;
constexpr int kQ41TileBlock = 320;  // bytes of a block in a tile
constexpr int kQ80TilePair = 1088;  // bytes of two blocks in a tile
constexpr int kKinds = 5;
constexpr int kKvTypes = 5;  // by enum bt_kv; 0 is none
constexpr int kWidthMax = 8;
constexpr int kBatchMax = 64;
// Sequences longer than kChunksMax * kChunkTokensMin are still cut into this many parts.
constexpr int kChunksMax = 16;
constexpr int kChunkTokensMin = 64;

// Forms of activations that kinds need.
enum Form : unsigned { kFormF32 = 1, kFormBf16 = 2, kFormInteger = 4 };

// A run of sequences that one pass over a tile serves; widths are compile-time in the kernels.
struct Group {
    int first;
    int width;
};

// One matrix's input for the whole batch. Inside a group values interleave: item i of sequence
// first + b stands at first * items + i * width + b.
struct Activations {
    float* f32;      // [columns]
    uint32_t* bf16;  // [columns / 2] pairs
    int32_t* q;      // [columns / 2] int16 pairs, or [columns / 4] int8 quads
    float* scale;    // [columns / 32]
    float* sum;      // [columns / 32] scale times the sum of the integers
    int32_t* isum;   // [columns / 32] the sum of the integers
};

struct TileJob {
    const uint8_t* tile;
    int columns;
    const Activations* input;
    const Group* groups;
    int group_count;
    float* out;  // [batch][16]
};

struct PrepareJob {
    const float* x;  // [columns]
    int columns;
    unsigned forms;
    bool is_int8;
    Activations* target;
    Group group;
    int index;  // sequence in the group
};

// One KV head of one sequence over positions [first, last): `group` query heads share it.
struct AttendJob {
    const uint8_t* base;
    size_t slot_bytes;
    const int32_t* table;
    size_t k_offset;  // of (layer, K, head) in a page
    size_t v_offset;
    size_t k_scales;  // of (layer, K, head) in an int8 page
    size_t v_scales;
    int block_tokens;
    int head_dim;
    int first;
    int last;
    int length;  // of the whole sequence
    int group;
    const float* query;  // [group][head_dim], scaled
    float* scores;       // [group][score_stride]
    int score_stride;
    float* partial;  // per query head: maximum, sum, 14 unused, then [head_dim]
    int partial_stride;
    int prefetch_pages;
};

// One head turned by its position; what lies beyond `rotary_dim` is only scaled.
struct RotateJob {
    const float* x;  // [head_dim]
    const float* cosine;
    const float* sine;
    float scale;
    float* out;
    int rotary_dim;
    int head_dim;
};

struct MergeJob {
    const float* partial;
    int partial_stride;  // to the next chunk
    int chunks;
    int head_dim;
    float* out;
};

struct KernelTable {
    const char* name;
    int width_max;
    void (*tile[kKinds])(const TileJob&);
    void (*tile_int8[kKinds])(const TileJob&);  // with int8 activations; null for float kinds
    void (*rms_norm)(const float* x, const float* weight, float* out, int n, float eps);
    void (*prepare)(const PrepareJob&);
    void (*rotate)(const RotateJob&);
    void (*store_kv[kKvTypes])(const float* x, void* out, float* scale, int n);  // scale: int8 only
    void (*attend[kKvTypes])(const AttendJob&);
    void (*merge)(const MergeJob&);
    void (*silu_mul)(const float* gate, const float* up, float* out, int n);
};

// Null where not built for this architecture.
const KernelTable* portable_table();
const KernelTable* avx2_table();
const KernelTable* avx512_table();
const KernelTable* avx512_bf16_table();
const KernelTable* neon_table();

constexpr int kPartialHead = 16;  // floats before the values of a partial result

}  // namespace bt
