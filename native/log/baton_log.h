/* The framing of the kvstore's log, native: scanning a segment's bytes, and sealing a group of
 * records before it is written. The bytes are those of docs/formats.md, section 7.
 *
 * A plain C interface, loaded by Python with cffi. Every function checks the sizes it is given,
 * allocates nothing, keeps nothing, and never looks outside the buffers that it is handed.
 */
#ifndef BATON_LOG_H
#define BATON_LOG_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BL_EXPORT __attribute__((visibility("default")))

#define BL_ABI_VERSION 1

/* Why a scan stopped, in the order in which a record is checked. */
enum bl_stop {
    BL_END = 0,           /* at the end of the bytes, or only zeros follow */
    BL_FULL = 1,          /* no room for more rows: scan again from end_offset */
    BL_HEADER = 2,        /* fewer bytes than a header */
    BL_MAGIC = 3,
    BL_HEADER_CRC = 4,
    BL_VERSION = 5,
    BL_TYPE = 6,
    BL_FLAGS = 7,
    BL_PAYLOAD_BYTES = 8,
    BL_CHAIN_CRC = 9,
    BL_PAYLOAD = 10,      /* ends behind the bytes present */
    BL_PAYLOAD_CRC = 11,
    BL_PADDING = 12
};

/* What a call can refuse; negative, so that it never looks like a count. */
enum bl_error {
    BL_BAD_ARGUMENT = -1, /* a null pointer, or an offset or size that is no multiple of 64 */
    BL_BAD_RECORD = -2    /* sealing: the bytes are not whole unsealed records */
};

/* One valid record, 64 bytes. */
struct bl_row {
    uint64_t offset; /* of the record's header in the buffer */
    uint64_t lsn;
    uint64_t generation;
    uint8_t log_id[16];
    uint32_t position;
    uint32_t payload_bytes;
    uint32_t log; /* the log id's number: dense, in the order of first appearance */
    uint32_t chain_crc;
    uint16_t flags;
    uint8_t type_code;
    uint8_t zero[5];
};

struct bl_scan {
    uint64_t end_offset; /* where the last valid record ends */
    uint64_t row_count;
    uint32_t log_count; /* distinct log ids so far */
    uint32_t chain_crc; /* after the last valid record */
    uint32_t stop;      /* enum bl_stop */
    uint32_t zero;
};

BL_EXPORT uint32_t bl_abi_version(void);

/* Continues a CRC-32C (0 to begin). */
BL_EXPORT uint32_t bl_crc32c(uint32_t crc, const uint8_t* data, uint64_t size);

/* Reads records from `offset` until the end, the first bad one, or `row_capacity`.
 * `chain_crc`: the chain before the first; with `is_chain_known` 0 the first record's own is taken.
 * `slots`: `slot_count` zeros (a power of two, over twice the rows of all calls that share it), a
 * hash table that numbers log ids; scanning on, hand it back with the rows so far.
 * Rows go to rows[out->row_count...]; `out` is read (row_count, log_count) and written.
 * Returns 0 or an error. */
BL_EXPORT int32_t bl_scan_records(const uint8_t* data, uint64_t size, uint64_t offset,
                                  uint32_t chain_crc, uint32_t is_chain_known, struct bl_row* rows,
                                  uint64_t row_capacity, uint32_t* slots, uint64_t slot_count,
                                  struct bl_scan* out);

/* The first offset from `offset` on where a record stands whose own CRCs and padding hold, whatever
 * stands before it; `size` where there is none. Negative: an error. */
BL_EXPORT int64_t bl_find_record(const uint8_t* data, uint64_t size, uint64_t offset);

/* Completes records that stand one after the other with LSN, CRCs and chain still zero: numbers
 * them from `first_lsn` and fills those fields in. `*chain_crc` is the chain before, and after.
 * Returns the number of records, or an error (then nothing may be written). */
BL_EXPORT int64_t bl_seal_records(uint8_t* data, uint64_t size, uint64_t first_lsn,
                                  uint32_t* chain_crc);

#ifdef __cplusplus
}
#endif

#endif
