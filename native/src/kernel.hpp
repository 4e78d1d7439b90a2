// What a kernel is: shape, weights, buffers, threads. step.cpp computes, kernel.cpp builds.
#pragma once

#include "baton_step.h"
#include "pack.hpp"
#include "table.hpp"
#include "threads.hpp"

namespace bt {

// Memory taken whole, zeroed and touched; handed out in order, each piece on 64 bytes.
class Region {
  public:
    Region() = default;
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region();

    bool take(size_t bytes);
    // Null when the region is used up.
    uint8_t* give(size_t bytes);
    size_t bytes() const { return bytes_; }
    uint8_t* base() { return base_; }

    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

  private:
    uint8_t* base_ = nullptr;
    size_t bytes_ = 0;
    size_t used_ = 0;
};

struct Layer {
    Matrix query, key, value, output, gate, up, down;
    float* attention_norm = nullptr;
    float* feed_forward_norm = nullptr;
    float* bias = nullptr;  // of Q, K and V side by side
    float* query_norm = nullptr;
    float* key_norm = nullptr;
    uint32_t vectors = 0;  // a bit for each enum bt_role that was set
    // Forms of activations that the matrices of each phase read.
    unsigned qkv_forms = 0, output_forms = 0, gate_up_forms = 0, down_forms = 0;
};

// A thread's own buffers.
struct Worker {
    Activations activations;
    float* row;      // [widest input]
    float* tile;     // [2][batch][16]
    float* query;    // [group][head_dim]
    float* turned;   // [head_dim]
    float* scores;   // [group][score_stride]
    float* best;     // [batch] largest logit
    int32_t* token;  // [batch] its id
};

// One bt_step call, as checked.
struct Step {
    int batch;
    const int32_t* tokens;
    const int32_t* positions;
    const int32_t* tables[kBatchMax];
    int lengths[kBatchMax];
    int chunk_tokens[kBatchMax];
    float* logits;
    uint32_t* slot_crcs;
    bool needs_best;
    Group groups[kBatchMax];
    int group_count;
    bool is_shared;  // inputs are prepared once by all threads, not by each for itself
};

}  // namespace bt

struct bt_kernel {
    bt_config config{};
    const bt::KernelTable* table = nullptr;
    bt::Region weights, norms, buffers;
    bt::Layer* layers = nullptr;
    bt::Matrix embedding, head;
    unsigned head_forms = 0;
    float* final_norm = nullptr;
    float* cosine = nullptr;
    float* sine = nullptr;
    bool has_rope = false;
    bool has_final_norm = false;

    uint8_t* pages = nullptr;
    size_t slot_bytes = 0;
    uint64_t page_count = 0;

    // Shared by all threads; [batch_max] rows each.
    float* hidden = nullptr;
    float* projected = nullptr;  // Q, K and V
    float* inner = nullptr;      // SiLU(gate) * up
    float* partials = nullptr;   // [heads][chunks][16 + head_dim]
    bt::Activations shared{};
    bt::Worker* workers = nullptr;
    int group = 0;  // query heads of a KV head
    int score_stride = 0;
    int partial_stride = 0;

    bt::Step step{};
    uint64_t profile[BT_PHASES] = {};
    bool is_sealed = false;
    bt::Threads threads;

    int query_width() const { return static_cast<int>(config.heads * config.head_dim); }
    int kv_width() const { return static_cast<int>(config.kv_heads * config.head_dim); }
    int projected_width() const { return query_width() + 2 * kv_width(); }
    size_t item_bytes() const {
        return config.kv == BT_KV_F32 ? 4 : config.kv == BT_KV_INT8 ? 1 : 2;
    }
    // Rows of one token slot: each (layer, K or V, head).
    size_t slot_rows() const { return size_t{2} * config.kv_heads * config.layers; }
    // Bytes of scales at the head of a page.
    size_t scales_bytes() const {
        return config.kv == BT_KV_INT8 ? slot_rows() * config.block_tokens * sizeof(float) : 0;
    }
    // Bytes of one (layer, K or V, head) in a page.
    size_t rows_bytes() const { return item_bytes() * config.block_tokens * config.head_dim; }
    size_t page_bytes() const { return rows_bytes() * slot_rows() + scales_bytes(); }
    size_t row_of(int layer, int part, int kv_head) const {
        return (static_cast<size_t>(layer) * 2 + static_cast<size_t>(part)) * config.kv_heads +
               static_cast<size_t>(kv_head);
    }
    size_t kv_offset(int layer, int part, int kv_head) const {
        return scales_bytes() + row_of(layer, part, kv_head) * rows_bytes();
    }
    // Where the scales of one (layer, K or V, head) begin in an int8 page.
    size_t scale_offset(int layer, int part, int kv_head) const {
        return row_of(layer, part, kv_head) * config.block_tokens * sizeof(float);
    }
};

namespace bt {

// The work of one thread in a step; `kernel` is a bt_kernel.
void run_step(void* kernel, int thread);

}  // namespace bt
