// Included last by each kernels_*.cpp: fills the table of its instruction set.
#pragma once

#include "rows.hpp"
#include "matvec.hpp"
#include "attend.hpp"

namespace bt {
namespace {

KernelTable make_table(const char* name) {
    return {
        .name = name,
        .width_max = kWidthMaxHere,
        .tile = {run_tile<F32Tile>, run_tile<Bf16Tile>, run_tile<ByteTile<false, false>>,
                 run_tile<ByteTile<false, true>>, run_tile<Q41Tile<false>>},
        .tile_int8 = {nullptr, nullptr, run_tile<ByteTile<true, false>>,
                      run_tile<ByteTile<true, true>>, run_tile<Q41Tile<true>>},
        .rms_norm = rms_norm,
        .prepare = prepare,
        .rotate = rotate,
        .store_kv = {nullptr, store_kv<KvF16>, store_kv<KvBf16>, store_kv<KvF32>, store_int8},
        .attend = {nullptr, attend<KvF16>, attend<KvBf16>, attend<KvF32>, attend<KvInt8>},
        .merge = merge,
        .silu_mul = silu_mul,
    };
}

}  // namespace
}  // namespace bt
