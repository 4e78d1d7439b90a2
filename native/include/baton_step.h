/* The step kernel's C interface: one token for up to 64 sequences through a whole decoder.
 *
 * A kernel owns its weights, its buffers and its worker threads; it reads and writes KV in pages
 * that the caller owns. All memory is taken in bt_create, bt_set_* and bt_seal; bt_step takes none,
 * holds no lock and calls the system only to wait (futex, sched_yield) and to read the clock.
 *
 * Every function returns BT_OK or an error; nothing throws. Sizes and page tables are checked
 * against what was declared before anything is read. One thread calls one kernel at a time; any
 * number of kernels may be used side by side.
 */
#ifndef BATON_STEP_H
#define BATON_STEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BT_EXPORT __attribute__((visibility("default")))

/* Raised with every change of this file; the loader refuses another number. */
#define BT_ABI_VERSION 3

enum bt_error {
    BT_OK = 0,
    BT_BAD_SHAPE = -1,    /* a number of bt_config is out of range */
    BT_BAD_MATRIX = -2,   /* role, layer, kind, size or source of a weight does not fit */
    BT_NO_MEMORY = -3,    /* the system gave no memory or no thread */
    BT_NOT_SEALED = -4,   /* bt_step before bt_seal, or a weight after it */
    BT_INCOMPLETE = -5,   /* bt_seal while a weight, the RoPE table or the pages are missing */
    BT_BAD_BATCH = -6,    /* batch is not 1 to batch_max */
    BT_BAD_TOKEN = -7,    /* a token id is outside the vocabulary */
    BT_BAD_POSITION = -8, /* a position is outside the context */
    BT_SHORT_TABLE = -9,  /* a page table has too few pages for its position */
    BT_BAD_PAGE = -10,    /* a page table names a page that does not exist */
    BT_SHARED_SLOT = -11, /* two sequences of a step would write one slot */
    BT_NO_ISA = -12       /* the named instruction set is not built in, or not on this CPU */
};

enum bt_isa {
    BT_ISA_AUTO = 0,
    BT_ISA_PORTABLE,
    BT_ISA_AVX2,
    BT_ISA_AVX512,
    BT_ISA_AVX512_BF16,
    BT_ISA_NEON
};

/* How a matrix is kept; also the form in which bt_set_matrix takes it: float32 rows for the first
 * three, the GGUF's own blocks of 32 for the last two. */
enum bt_kind { BT_F32 = 0, BT_BF16, BT_INT8, BT_Q8_0, BT_Q4_1 };

/* KV element type, numbered as in blob headers. Pages of int8 begin with a float32 scale for each
 * (layer, K or V, head, slot). */
enum bt_kv { BT_KV_F16 = 1, BT_KV_BF16 = 2, BT_KV_F32 = 3, BT_KV_INT8 = 4 };

/* Integer activations for BT_INT8, BT_Q8_0 and BT_Q4_1. */
enum bt_activation { BT_ACT_INT16 = 0, BT_ACT_INT8 = 1 };

enum bt_role {
    BT_EMBEDDING = 0,
    BT_HEAD,
    BT_FINAL_NORM, /* layer is 0 */
    BT_QUERY,
    BT_KEY,
    BT_VALUE,
    BT_OUTPUT,
    BT_GATE,
    BT_UP,
    BT_DOWN,
    BT_ATTENTION_NORM,
    BT_FEED_FORWARD_NORM,
    BT_QUERY_BIAS, /* with has_qkv_bias: [heads * head_dim] */
    BT_KEY_BIAS,   /* and [kv_heads * head_dim] */
    BT_VALUE_BIAS,
    BT_QUERY_NORM, /* with has_qk_norm: [head_dim], of every head */
    BT_KEY_NORM
};

typedef struct bt_config {
    uint32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
    uint32_t max_context;    /* positions the RoPE table covers */
    uint32_t block_tokens;   /* token slots of a page */
    uint32_t kv;             /* enum bt_kv */
    uint32_t activation;     /* enum bt_activation */
    uint32_t isa;            /* enum bt_isa */
    uint32_t batch_max;      /* 1 to 64 */
    uint32_t threads;        /* 1 to 64, the calling thread counted */
    uint32_t prefetch_pages; /* how many pages ahead KV is prefetched; 0 is off */
    uint32_t has_tied_head;  /* 1: the head is the embedding */
    uint32_t has_qkv_bias;   /* 1: Q, K and V have biases */
    uint32_t has_qk_norm;    /* 1: every head of Q and K is normalised before RoPE */
    uint32_t rotary_dim;     /* elements of a head that RoPE turns, the first; even */
    float rms_eps;
    uint64_t weight_bytes; /* sum of bt_packed_bytes of all matrices to come */
} bt_config;

typedef struct bt_memory {
    uint64_t weight_bytes; /* packed matrices, norms, RoPE table */
    uint64_t buffer_bytes; /* activations, scores, partial results, thread stacks */
} bt_memory;

typedef struct bt_kernel bt_kernel;

BT_EXPORT uint32_t bt_abi_version(void);
/* The instruction set `isa` resolves to on this CPU (enum bt_isa), or BT_NO_ISA. */
BT_EXPORT int bt_resolve_isa(uint32_t isa);
BT_EXPORT const char* bt_isa_name(int isa);

/* Bytes a matrix takes once packed; 0 when the kind cannot hold that many columns. */
BT_EXPORT uint64_t bt_packed_bytes(uint32_t kind, uint64_t rows, uint64_t columns);

BT_EXPORT int bt_create(const bt_config* config, bt_kernel** kernel);
BT_EXPORT void bt_destroy(bt_kernel* kernel);

/* Copy a matrix [rows, columns] into the kernel; rows of Q and K in half-split RoPE order. */
BT_EXPORT int bt_set_matrix(bt_kernel* kernel, uint32_t role, uint32_t layer, uint32_t kind,
                            const void* source, uint64_t source_bytes);
/* A norm or a bias; `items` floats. */
BT_EXPORT int bt_set_vector(bt_kernel* kernel, uint32_t role, uint32_t layer, const float* weight,
                            uint64_t items);
/* cosine and sine, each [max_context, rotary_dim / 2]. */
BT_EXPORT int bt_set_rope(bt_kernel* kernel, const float* cosine, const float* sine,
                          uint64_t items);
/* Where page 0 begins, bytes from a page to the next, and how many there are; the caller keeps
 * them mapped. May be called again between steps. */
BT_EXPORT int bt_set_pages(bt_kernel* kernel, void* base, uint64_t slot_bytes, uint64_t pages);
/* No weights after this: takes the buffers and starts the threads. */
BT_EXPORT int bt_seal(bt_kernel* kernel);

BT_EXPORT void bt_memory_use(const bt_kernel* kernel, bt_memory* memory);

/* The packed matrices as they lie in memory, `*bytes` of them; for tests of what one damaged byte
 * does. */
BT_EXPORT uint8_t* bt_weight_memory(bt_kernel* kernel, uint64_t* bytes);

/* One token each for `batch` sequences. tokens[i] stands at positions[i]; its pages are
 * tables[table_ends[i - 1]] to tables[table_ends[i] - 1] (table_ends[-1] counts as 0), page k of
 * them holding positions k * block_tokens and on. Writes K and V of every token into its slot.
 *
 * logits [batch, vocabulary] and best_tokens [batch] (largest logit, lowest id on ties) may each be
 * NULL. slot_crcs [batch] gets the CRC-32C of each written slot's content in layout order.
 * On an error nothing was written, and *culprit is the sequence at fault. */
BT_EXPORT int bt_step(bt_kernel* kernel, uint32_t batch, const int32_t* tokens,
                      const int32_t* positions, const int32_t* tables, const uint32_t* table_ends,
                      float* logits, int32_t* best_tokens, uint32_t* slot_crcs, uint32_t* culprit);

/* CRC-32C of bytes, continuing `crc` (0 to begin). */
BT_EXPORT uint32_t bt_crc32c(uint32_t crc, const void* data, uint64_t bytes);

/* Read `bytes` of `data` once, as a plain stream; returns a sum, so that nothing is optimised away.
 * For measuring what memory can do. */
BT_EXPORT uint64_t bt_read_all(const void* data, uint64_t bytes);

/* Nanoseconds thread 0 spent in each phase since the last call, for profiles; see step.cpp. */
#define BT_PHASES 10
BT_EXPORT void bt_take_profile(bt_kernel* kernel, uint64_t* nanoseconds);

#ifdef __cplusplus
}
#endif
#endif
