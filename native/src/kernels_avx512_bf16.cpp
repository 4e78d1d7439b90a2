// The step's functions for: avx512 bf16.
#include "table.hpp"

#ifdef __AVX512BF16__

#include "vec_avx512.hpp"
#include "make_table.hpp"

namespace bt {

const KernelTable* avx512_bf16_table() {
    static const KernelTable table = make_table("avx512_bf16");
    return &table;
}

}  // namespace bt

#else

const bt::KernelTable* bt::avx512_bf16_table() {
    return nullptr;
}

#endif
