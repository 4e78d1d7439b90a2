// The step's functions for: avx2.
#include "table.hpp"

#ifdef __AVX2__

#include "vec_avx2.hpp"
#include "make_table.hpp"

namespace bt {

const KernelTable* avx2_table() {
    static const KernelTable table = make_table("avx2");
    return &table;
}

}  // namespace bt

#else

const bt::KernelTable* bt::avx2_table() {
    return nullptr;
}

#endif
