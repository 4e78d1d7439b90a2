// CRC-32C by the CPU's own instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bt {

// Continues `crc` (0 to begin) over `bytes` of `data`.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

}  // namespace bt
