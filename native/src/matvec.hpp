// One tile of 16 rows times the inputs of a whole batch, for every kind of matrix.
//
// Included once per instruction set, after its vec_*.hpp. A sequence's sums are taken in an order
// that does not depend on the width of its group: what else is in the batch never shows.
#pragma once

#include "table.hpp"

#define BT_UNROLL _Pragma("GCC unroll 8")

namespace bt {
namespace {

template <int W>
inline void store_sums(const Vf* acc, int first, float* out) {
    BT_UNROLL
    for (int b = 0; b < W; ++b) {
        vf_store(out + (first + b) * kTileRows, acc[b]);
    }
}

struct F32Tile {
    template <int W>
    static void run(const TileJob& job, int first) {
        const float* w = reinterpret_cast<const float*>(job.tile);
        const float* x = job.input->f32 + static_cast<size_t>(first) * job.columns;
        Vf even[W], odd[W];
        BT_UNROLL
        for (int b = 0; b < W; ++b) {
            even[b] = odd[b] = vf_zero();
        }
        for (int k = 0; k < job.columns; k += 2, w += 32, x += 2 * W) {
            const Vf w0 = vf_load(w), w1 = vf_load(w + 16);
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                even[b] = vf_fma(w0, vf_set1(x[b]), even[b]);
                odd[b] = vf_fma(w1, vf_set1(x[W + b]), odd[b]);
            }
        }
        BT_UNROLL
        for (int b = 0; b < W; ++b) {
            even[b] = vf_add(even[b], odd[b]);
        }
        store_sums<W>(even, first, job.out);
    }
};

struct Bf16Tile {
    template <int W>
    static void run(const TileJob& job, int first) {
        const uint8_t* w = job.tile;
        const int pairs = job.columns / 2;
        const uint32_t* x = job.input->bf16 + static_cast<size_t>(first) * pairs;
        Vf even[W], odd[W];
        BT_UNROLL
        for (int b = 0; b < W; ++b) {
            even[b] = odd[b] = vf_zero();
        }
        int k = 0;
        for (; k + 1 < pairs; k += 2, w += 128, x += 2 * W) {
            const Vi w0 = vi_load(w), w1 = vi_load(w + 64);
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                even[b] = vf_dot_bf16(even[b], w0, x[b]);
                odd[b] = vf_dot_bf16(odd[b], w1, x[W + b]);
            }
        }
        if (k < pairs) {
            const Vi w0 = vi_load(w);
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                even[b] = vf_dot_bf16(even[b], w0, x[b]);
            }
        }
        BT_UNROLL
        for (int b = 0; b < W; ++b) {
            even[b] = vf_add(even[b], odd[b]);
        }
        store_sums<W>(even, first, job.out);
    }
};

// Adds one block of 32 columns of signed bytes to the integer sums.
template <int W, bool kInt8>
inline void dot_block_s8(const uint8_t* w, const int32_t* q, Vi* sums) {
    BT_UNROLL
    for (int t = 0; t < kBlock / 4; ++t, w += 64) {
        const Vi bytes = vi_load(w);
        if constexpr (kInt8) {
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                sums[b] = vi_dot_s8(sums[b], bytes, q[t * W + b]);
            }
        } else {
            const Vi even = vi_even16(bytes), odd = vi_odd16(bytes);
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                sums[b] = vi_dot16(sums[b], even, q[2 * t * W + b]);
                sums[b] = vi_dot16(sums[b], odd, q[(2 * t + 1) * W + b]);
            }
        }
    }
}

// Signed bytes with a scale per row (whole row) or per row and block.
template <bool kInt8, bool kPerBlock>
struct ByteTile {
    template <int W>
    static void run(const TileJob& job, int first) {
        const int blocks = job.columns / kBlock;
        constexpr int kDwords = kInt8 ? kBlock / 4 : kBlock / 2;
        const size_t at = static_cast<size_t>(first) * blocks;
        const int32_t* q = job.input->q + at * kDwords;
        const float* scale = job.input->scale + at;
        const int32_t* isum = job.input->isum + at;
        const uint8_t* w = job.tile + (kPerBlock ? 0 : 64);
        Vf acc[W];
        BT_UNROLL
        for (int b = 0; b < W; ++b) {
            acc[b] = vf_zero();
        }
        for (int k = 0; k < blocks; ++k, q += kDwords * W) {
            Vf d = vf_set1(1.0f);
            if constexpr (kPerBlock) {
                const uint8_t* pair = job.tile + static_cast<size_t>(k / 2) * kQ80TilePair;
                d = vf_load_f16(reinterpret_cast<const uint16_t*>(pair) + k % 2 * kTileRows);
                w = pair + 64 + k % 2 * kBlock * kTileRows;
            }
            Vi sums[W];
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                sums[b] = kInt8 ? vi_start_s8(isum[k * W + b]) : vi_zero();
            }
            dot_block_s8<W, kInt8>(w, q, sums);
            w += kBlock * kTileRows;
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                const Vf both = vf_mul(d, vf_set1(scale[k * W + b]));
                acc[b] = vf_fma(vi_to_f(sums[b]), both, acc[b]);
            }
        }
        if constexpr (!kPerBlock) {
            const Vf row = vf_load(reinterpret_cast<const float*>(job.tile));
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                acc[b] = vf_mul(acc[b], row);
            }
        }
        store_sums<W>(acc, first, job.out);
    }
};

// Adds one Q4_1 block to the integer sums.
template <int W, bool kInt8>
inline void dot_block_q4(const uint8_t* w, const int32_t* q, Vi* sums) {
    BT_UNROLL
    for (int t = 0; t < 4; ++t) {
        const Vi nibbles = vi_load(w + 64 * t);
        if constexpr (kInt8) {
            const Vi low = vi_low_nibbles(nibbles), high = vi_high_nibbles(nibbles);
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                sums[b] = vi_dot_nibbles(sums[b], low, q[2 * t * W + b]);
                sums[b] = vi_dot_nibbles(sums[b], high, q[(2 * t + 1) * W + b]);
            }
        } else {
            const Vi n0 = vi_nibble16<0>(nibbles), n1 = vi_nibble16<8>(nibbles);
            const Vi n2 = vi_nibble16<4>(nibbles), n3 = vi_nibble16<12>(nibbles);
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                sums[b] = vi_dot16(sums[b], n0, q[4 * t * W + b]);
                sums[b] = vi_dot16(sums[b], n1, q[(4 * t + 1) * W + b]);
                sums[b] = vi_dot16(sums[b], n2, q[(4 * t + 2) * W + b]);
                sums[b] = vi_dot16(sums[b], n3, q[(4 * t + 3) * W + b]);
            }
        }
    }
}

template <bool kInt8>
struct Q41Tile {
    template <int W>
    static void run(const TileJob& job, int first) {
        const int blocks = job.columns / kBlock;
        constexpr int kDwords = kInt8 ? kBlock / 4 : kBlock / 2;
        const size_t at = static_cast<size_t>(first) * blocks;
        const int32_t* q = job.input->q + at * kDwords;
        const float* scale = job.input->scale + at;
        const float* sum = job.input->sum + at;
        const uint8_t* w = job.tile;
        Vf acc[W];
        BT_UNROLL
        for (int b = 0; b < W; ++b) {
            acc[b] = vf_zero();
        }
        for (int k = 0; k < blocks;
             ++k, w += kQ41TileBlock, q += kDwords * W, scale += W, sum += W) {
            Vi sums[W];
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                sums[b] = vi_zero();
            }
            dot_block_q4<W, kInt8>(w, q, sums);
            const Vf d = vf_load_f16(reinterpret_cast<const uint16_t*>(w + 256));
            const Vf m = vf_load_f16(reinterpret_cast<const uint16_t*>(w + 288));
            BT_UNROLL
            for (int b = 0; b < W; ++b) {
                acc[b] = vf_fma(m, vf_set1(sum[b]), acc[b]);
                acc[b] = vf_fma(vi_to_f(sums[b]), vf_mul(d, vf_set1(scale[b])), acc[b]);
            }
        }
        store_sums<W>(acc, first, job.out);
    }
};

// The width of a group is known at compile time from here on.
template <typename Tile>
void run_tile(const TileJob& job) {
    for (int i = 0; i < job.group_count; ++i) {
        const int first = job.groups[i].first;
        switch (job.groups[i].width) {
            case 8:
                if constexpr (kWidthMaxHere >= 8) {
                    Tile::template run<8>(job, first);
                }
                break;
            case 4:
                if constexpr (kWidthMaxHere >= 4) {
                    Tile::template run<4>(job, first);
                }
                break;
            case 2:
                Tile::template run<2>(job, first);
                break;
            default:
                Tile::template run<1>(job, first);
        }
    }
}

}  // namespace
}  // namespace bt
