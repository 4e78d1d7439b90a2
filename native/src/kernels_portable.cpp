// The step's functions for: portable.
#include "vec_portable.hpp"
#include "make_table.hpp"

namespace bt {

const KernelTable* portable_table() {
    static const KernelTable table = make_table("portable");
    return &table;
}

}  // namespace bt
