// Memory of a kernel: taken whole, handed out in pieces, given back whole.
#include <sys/mman.h>

#include "kernel.hpp"

namespace bt {

Region::~Region() {
    if (base_ != nullptr) {
        munmap(base_, bytes_);
    }
}

bool Region::take(size_t bytes) {
    constexpr size_t kHuge = size_t{2} << 20;
    bytes = (bytes + kHuge - 1) / kHuge * kHuge;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    base_ = static_cast<uint8_t*>(memory);
    bytes_ = bytes;
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: plain pages serve as well
#endif
    // Touched now, so that a step meets no page fault and the stated memory is the used one.
    for (size_t at = 0; at < bytes; at += 4096) {
        base_[at] = 0;
    }
    return true;
}

uint8_t* Region::give(size_t bytes) {
    bytes = rounded(bytes);
    if (base_ == nullptr || bytes > bytes_ - used_) {
        return nullptr;
    }
    uint8_t* piece = base_ + used_;
    used_ += bytes;
    return piece;
}

}  // namespace bt
