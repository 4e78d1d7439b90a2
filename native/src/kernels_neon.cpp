// The step's functions for: neon.
#include "table.hpp"

#ifdef __aarch64__

#include "vec_neon.hpp"
#include "make_table.hpp"

namespace bt {

const KernelTable* neon_table() {
    static const KernelTable table = make_table("neon");
    return &table;
}

}  // namespace bt

#else

const bt::KernelTable* bt::neon_table() {
    return nullptr;
}

#endif
