// The step's functions for: avx512.
#include "table.hpp"

#ifdef __AVX512VNNI__

#include "vec_avx512.hpp"
#include "make_table.hpp"

namespace bt {

const KernelTable* avx512_table() {
    static const KernelTable table = make_table("avx512");
    return &table;
}

}  // namespace bt

#else

const bt::KernelTable* bt::avx512_table() {
    return nullptr;
}

#endif
