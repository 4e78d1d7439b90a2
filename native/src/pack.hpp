// Packing matrices into tiles, and reading one row back (for the embedding).
#pragma once

#include <cstddef>
#include <cstdint>

namespace bt {

struct Matrix {
    const uint8_t* data = nullptr;
    uint32_t kind = 0;
    int rows = 0;
    int columns = 0;
    int tiles = 0;
    size_t tile_bytes = 0;
};

// 0 when the kind cannot hold that many columns.
size_t tile_bytes(uint32_t kind, uint64_t columns);
// Bytes of one source row; see bt_set_matrix.
size_t source_row_bytes(uint32_t kind, uint64_t columns);
// Fill the tiles at `target` from rows at `source`; rows past the last are zero.
void pack_matrix(const Matrix& matrix, const uint8_t* source, uint8_t* target);
void unpack_row(const Matrix& matrix, int row, float* out);

}  // namespace bt
