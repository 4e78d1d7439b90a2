/* Copying KV into and out of arenas with its checksum, the bytes going through the CPU once.
 *
 * A plain C interface, loaded by Python with cffi. Every function checks the sizes it is given,
 * allocates nothing, keeps nothing, and never looks outside the buffers that it is handed.
 */
#ifndef BATON_COPY_H
#define BATON_COPY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BC_EXPORT __attribute__((visibility("default")))

#define BC_ABI_VERSION 2

/* What a call can refuse; negative. */
enum bc_error {
    BC_BAD_ARGUMENT = -1, /* a null pointer, or a count that does not belong to the sizes */
    BC_OUT_OF_BOUNDS = -2 /* a place that is not wholly inside the buffer; nothing was copied */
};

BC_EXPORT uint32_t bc_abi_version(void);

/* Continues a CRC-32C (0 to begin). */
BC_EXPORT uint32_t bc_crc32c(uint32_t crc, const uint8_t* data, uint64_t size);

/* Copies `size` bytes between buffers that do not overlap; returns `crc` continued over them. */
BC_EXPORT uint32_t bc_copy_crc32c(uint32_t crc, uint8_t* target, const uint8_t* source,
                                  uint64_t size);

/* Cuts `source` into `count` pieces of `piece_bytes` (the last may be shorter) and copies piece i
 * to `target + offsets[i]`; crcs[i] is its CRC-32C. Offsets are checked before anything is copied.
 * Returns 0 or an error. */
BC_EXPORT int32_t bc_scatter(uint8_t* target, uint64_t target_bytes, const uint64_t* offsets,
                             uint64_t count, const uint8_t* source, uint64_t source_bytes,
                             uint64_t piece_bytes, uint32_t* crcs);

/* The CRC-32C of `count` places of `piece_bytes` each, at `data + offsets[i]`. Returns 0 or an
 * error. */
BC_EXPORT int32_t bc_crc32c_at(const uint8_t* data, uint64_t data_bytes, const uint64_t* offsets,
                               uint64_t count, uint64_t piece_bytes, uint32_t* crcs);

/* The CRC-32C of each of `count` token slots of a page from `first_slot` on. A page is
 * `group_count` groups one after the other; group g has rows[g] rows, each `block_tokens` pieces
 * of row_bytes[g] bytes, one for each slot; a slot's content is its piece of every row, in order.
 * Returns 0 or an error. */
BC_EXPORT int32_t bc_slot_crcs(const uint8_t* page, uint64_t page_bytes, uint64_t block_tokens,
                               const uint64_t* rows, const uint64_t* row_bytes,
                               uint64_t group_count, uint64_t first_slot, uint64_t count,
                               uint32_t* crcs);

#ifdef __cplusplus
}
#endif

#endif
