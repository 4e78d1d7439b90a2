// Building a kernel: shapes checked, memory taken, weights packed, threads started.
#include "kernel.hpp"

#include <cstring>
#include <new>

namespace bt {

namespace {

constexpr uint32_t kLayersMax = 1024;
constexpr uint32_t kHeadsMax = 1024;
constexpr uint32_t kHeadDimMax = 1024;
constexpr uint32_t kWidthLimit = 1u << 19;
constexpr uint32_t kVocabularyMax = 1u << 22;
constexpr uint32_t kContextMax = 1u << 24;
constexpr uint32_t kThreadsMax = 64;
constexpr uint64_t kWeightBytesMax = uint64_t{1} << 46;

bool is_within(uint32_t value, uint32_t low, uint32_t high) {
    return value >= low && value <= high;
}

bool is_sound(const bt_config& c) {
    return is_within(c.layers, 1, kLayersMax) && is_within(c.hidden, 1, kWidthLimit) &&
           is_within(c.heads, 1, kHeadsMax) && is_within(c.kv_heads, 1, c.heads) &&
           c.heads % c.kv_heads == 0 && is_within(c.head_dim, 2, kHeadDimMax) &&
           c.head_dim % 2 == 0 && is_within(c.intermediate, 1, kWidthLimit) &&
           is_within(c.vocabulary, 1, kVocabularyMax) && is_within(c.max_context, 1, kContextMax) &&
           is_within(c.block_tokens, 1, 1024) && is_within(c.kv, BT_KV_F16, BT_KV_INT8) &&
           c.activation <= BT_ACT_INT8 && is_within(c.batch_max, 1, kBatchMax) &&
           is_within(c.threads, 1, kThreadsMax) && c.prefetch_pages <= 64 && c.has_tied_head <= 1 &&
           c.has_qkv_bias <= 1 && c.has_qk_norm <= 1 && is_within(c.rotary_dim, 2, c.head_dim) &&
           c.rotary_dim % 2 == 0 &&
           c.rms_eps > 0.0f && c.rms_eps < 1.0f && c.weight_bytes <= kWeightBytesMax;
}

struct Isa {
    const char* name;
    const KernelTable* (*table)();
};

constexpr Isa kIsas[] = {
    {"auto", nullptr},        {"portable", portable_table},       {"avx2", avx2_table},
    {"avx512", avx512_table}, {"avx512_bf16", avx512_bf16_table}, {"neon", neon_table}};

bool has_cpu(uint32_t isa) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 =
        has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni");
    switch (isa) {
        case BT_ISA_PORTABLE:
            return true;
        case BT_ISA_AVX2:
            return has_avx2;
        case BT_ISA_AVX512:
            return has_avx512;
        case BT_ISA_AVX512_BF16:
            return has_avx512 && __builtin_cpu_supports("avx512bf16");
        default:
            return false;
    }
#elif defined(__aarch64__)
    return isa == BT_ISA_PORTABLE || isa == BT_ISA_NEON;
#else
    return isa == BT_ISA_PORTABLE;
#endif
}

int chunk_tokens_max(const bt_config& c) {
    const uint32_t part = (c.max_context + kChunksMax - 1) / kChunksMax;
    const uint32_t tokens = part > kChunkTokensMin ? part : kChunkTokensMin;
    return static_cast<int>((tokens + c.block_tokens - 1) / c.block_tokens * c.block_tokens);
}

unsigned form_of(const Matrix& matrix) {
    switch (matrix.kind) {
        case BT_F32:
            return kFormF32;
        case BT_BF16:
            return kFormBf16;
        default:
            return kFormInteger;
    }
}

// Hands out floats and the like from a region; `is_complete` turns false when it is used up. With
// no region it only counts, so that one function both sizes and places.
class Taker {
  public:
    explicit Taker(Region* region) : region_(region) {}

    template <typename T>
    void take(T*& target, size_t count) {
        bytes_ += Region::rounded(count * sizeof(T));
        if (region_ != nullptr) {
            target = reinterpret_cast<T*>(region_->give(count * sizeof(T)));
            is_complete_ = is_complete_ && target != nullptr;
        }
    }
    size_t bytes() const { return bytes_; }
    bool is_complete() const { return is_complete_; }

  private:
    Region* region_;
    size_t bytes_ = 0;
    bool is_complete_ = true;
};

size_t widest_input(const bt_kernel& kernel) {
    size_t widest = kernel.config.hidden;
    const size_t query = static_cast<size_t>(kernel.query_width());
    widest = widest > query ? widest : query;
    return widest > kernel.config.intermediate ? widest : kernel.config.intermediate;
}

void take_activations(Taker& taker, Activations& target, size_t batch, size_t columns) {
    const size_t blocks = columns / kBlock + 1;
    taker.take(target.f32, batch * columns);
    taker.take(target.bf16, batch * (columns / 2 + 1));
    taker.take(target.q, batch * (columns / 2 + 1));
    taker.take(target.scale, batch * blocks);
    taker.take(target.sum, batch * blocks);
    taker.take(target.isum, batch * blocks);
}

// All buffers of the steps. `workers` has config.threads entries.
void take_buffers(Taker& taker, bt_kernel& kernel, Worker* workers) {
    const bt_config& c = kernel.config;
    const size_t batch = c.batch_max, columns = widest_input(kernel);
    taker.take(kernel.hidden, batch * c.hidden);
    taker.take(kernel.projected, batch * static_cast<size_t>(kernel.projected_width()));
    taker.take(kernel.inner, batch * c.intermediate);
    taker.take(kernel.partials,
               batch * c.heads * kChunksMax * static_cast<size_t>(kernel.partial_stride));
    take_activations(taker, kernel.shared, batch, columns);
    for (uint32_t i = 0; i < c.threads; ++i) {
        Worker& worker = workers[i];
        take_activations(taker, worker.activations, batch, columns);
        taker.take(worker.row, columns + 16);
        taker.take(worker.tile, 2 * batch * kTileRows);
        taker.take(worker.query, static_cast<size_t>(kernel.group) * c.head_dim + 16);
        taker.take(worker.turned, c.head_dim + 16);
        taker.take(worker.scores,
                   static_cast<size_t>(kernel.group) * static_cast<size_t>(kernel.score_stride));
        taker.take(worker.best, batch);
        taker.take(worker.token, batch);
    }
}

void take_norms(Taker& taker, bt_kernel& kernel, Layer* layers) {
    const bt_config& c = kernel.config;
    taker.take(kernel.final_norm, c.hidden);
    taker.take(kernel.cosine, static_cast<size_t>(c.max_context) * (c.rotary_dim / 2));
    taker.take(kernel.sine, static_cast<size_t>(c.max_context) * (c.rotary_dim / 2));
    for (uint32_t i = 0; i < c.layers; ++i) {
        taker.take(layers[i].attention_norm, c.hidden);
        taker.take(layers[i].feed_forward_norm, c.hidden);
        if (c.has_qkv_bias) {
            taker.take(layers[i].bias, static_cast<size_t>(kernel.projected_width()));
        }
        if (c.has_qk_norm) {
            taker.take(layers[i].query_norm, c.head_dim);
            taker.take(layers[i].key_norm, c.head_dim);
        }
    }
}

struct Target {
    Matrix* matrix;
    uint64_t rows;
    uint64_t columns;
};

Target target_of(bt_kernel& kernel, uint32_t role, uint32_t layer) {
    const bt_config& c = kernel.config;
    const uint64_t query = static_cast<uint64_t>(kernel.query_width());
    const uint64_t kv = static_cast<uint64_t>(kernel.kv_width());
    if (role <= BT_HEAD) {
        Matrix* matrix = role == BT_EMBEDDING ? &kernel.embedding : &kernel.head;
        const bool is_wanted = layer == 0 && !(role == BT_HEAD && c.has_tied_head);
        return {is_wanted ? matrix : nullptr, c.vocabulary, c.hidden};
    }
    if (layer >= c.layers) {
        return {nullptr, 0, 0};
    }
    Layer& here = kernel.layers[layer];
    switch (role) {
        case BT_QUERY:
            return {&here.query, query, c.hidden};
        case BT_KEY:
            return {&here.key, kv, c.hidden};
        case BT_VALUE:
            return {&here.value, kv, c.hidden};
        case BT_OUTPUT:
            return {&here.output, c.hidden, query};
        case BT_GATE:
            return {&here.gate, c.intermediate, c.hidden};
        case BT_UP:
            return {&here.up, c.intermediate, c.hidden};
        case BT_DOWN:
            return {&here.down, c.hidden, c.intermediate};
        default:
            return {nullptr, 0, 0};
    }
}

struct VectorTarget {
    float* place;
    uint64_t items;
};

VectorTarget vector_of(bt_kernel& kernel, uint32_t role, uint32_t layer) {
    const bt_config& c = kernel.config;
    if (role == BT_FINAL_NORM) {
        return {layer == 0 ? kernel.final_norm : nullptr, c.hidden};
    }
    if (layer >= c.layers) {
        return {nullptr, 0};
    }
    const Layer& here = kernel.layers[layer];
    const int query = kernel.query_width(), kv = kernel.kv_width();
    float* const bias = here.bias;
    switch (role) {
        case BT_ATTENTION_NORM:
            return {here.attention_norm, c.hidden};
        case BT_FEED_FORWARD_NORM:
            return {here.feed_forward_norm, c.hidden};
        case BT_QUERY_BIAS:
            return {bias, static_cast<uint64_t>(query)};
        case BT_KEY_BIAS:
            return {bias == nullptr ? bias : bias + query, static_cast<uint64_t>(kv)};
        case BT_VALUE_BIAS:
            return {bias == nullptr ? bias : bias + query + kv, static_cast<uint64_t>(kv)};
        case BT_QUERY_NORM:
            return {here.query_norm, c.head_dim};
        case BT_KEY_NORM:
            return {here.key_norm, c.head_dim};
        default:
            return {nullptr, 0};
    }
}

// The roles whose vectors every layer of this kernel needs, a bit each.
uint32_t layer_vectors(const bt_config& c) {
    uint32_t roles = 1u << BT_ATTENTION_NORM | 1u << BT_FEED_FORWARD_NORM;
    if (c.has_qkv_bias) {
        roles |= 1u << BT_QUERY_BIAS | 1u << BT_KEY_BIAS | 1u << BT_VALUE_BIAS;
    }
    if (c.has_qk_norm) {
        roles |= 1u << BT_QUERY_NORM | 1u << BT_KEY_NORM;
    }
    return roles;
}

bool is_complete(bt_kernel& kernel) {
    if (kernel.config.has_tied_head) {
        kernel.head = kernel.embedding;
    }
    bool has_all = kernel.embedding.data != nullptr && kernel.head.data != nullptr &&
                   kernel.has_rope && kernel.pages != nullptr && kernel.has_final_norm;
    for (uint32_t i = 0; i < kernel.config.layers && has_all; ++i) {
        const Layer& layer = kernel.layers[i];
        has_all = layer.vectors == layer_vectors(kernel.config);
        for (const Matrix* matrix : {&layer.query, &layer.key, &layer.value, &layer.output,
                                     &layer.gate, &layer.up, &layer.down}) {
            has_all = has_all && matrix->data != nullptr;
        }
    }
    return has_all;
}

void note_forms(bt_kernel& kernel) {
    kernel.head_forms = form_of(kernel.head);
    for (uint32_t i = 0; i < kernel.config.layers; ++i) {
        Layer& layer = kernel.layers[i];
        layer.qkv_forms = form_of(layer.query) | form_of(layer.key) | form_of(layer.value);
        layer.output_forms = form_of(layer.output);
        layer.gate_up_forms = form_of(layer.gate) | form_of(layer.up);
        layer.down_forms = form_of(layer.down);
    }
}

}  // namespace
}  // namespace bt

using namespace bt;

uint32_t bt_abi_version(void) {
    return BT_ABI_VERSION;
}

int bt_resolve_isa(uint32_t isa) {
    constexpr uint32_t kBestFirst[] = {BT_ISA_AVX512_BF16, BT_ISA_AVX512, BT_ISA_AVX2, BT_ISA_NEON,
                                       BT_ISA_PORTABLE};
    for (const uint32_t candidate : kBestFirst) {
        const bool is_asked = isa == BT_ISA_AUTO || isa == candidate;
        if (is_asked && has_cpu(candidate) && kIsas[candidate].table() != nullptr) {
            return static_cast<int>(candidate);
        }
    }
    return BT_NO_ISA;
}

const char* bt_isa_name(int isa) {
    return isa >= BT_ISA_AUTO && isa <= BT_ISA_NEON ? kIsas[isa].name : "unknown";
}

uint64_t bt_packed_bytes(uint32_t kind, uint64_t rows, uint64_t columns) {
    if (rows == 0 || rows > kVocabularyMax || columns > kWidthLimit) {
        return 0;
    }
    return Region::rounded((rows + kTileRows - 1) / kTileRows * tile_bytes(kind, columns));
}

int bt_create(const bt_config* config, bt_kernel** kernel) {
    if (!is_sound(*config)) {
        return BT_BAD_SHAPE;
    }
    const int isa = bt_resolve_isa(config->isa);
    if (isa < 0) {
        return BT_NO_ISA;
    }
    bt_kernel* made = new (std::nothrow) bt_kernel;
    if (made == nullptr) {
        return BT_NO_MEMORY;
    }
    made->config = *config;
    made->table = kIsas[isa].table();
    made->group = static_cast<int>(config->heads / config->kv_heads);
    made->score_stride = (chunk_tokens_max(*config) + 15) / 16 * 16 + 16;
    made->partial_stride = kPartialHead + static_cast<int>(config->head_dim + 15) / 16 * 16;
    made->layers = new (std::nothrow) Layer[config->layers];
    bool is_made = made->layers != nullptr && made->weights.take(config->weight_bytes + 64);
    if (is_made) {
        Taker sizing(nullptr);
        take_norms(sizing, *made, made->layers);
        is_made = made->norms.take(sizing.bytes());
    }
    if (is_made) {
        Taker placing(&made->norms);
        take_norms(placing, *made, made->layers);
        is_made = placing.is_complete();
    }
    if (!is_made) {
        bt_destroy(made);
        return BT_NO_MEMORY;
    }
    *kernel = made;
    return BT_OK;
}

void bt_destroy(bt_kernel* kernel) {
    if (kernel != nullptr) {
        kernel->threads.stop();
        delete[] kernel->layers;
        delete[] kernel->workers;
        delete kernel;
    }
}

int bt_set_matrix(bt_kernel* kernel, uint32_t role, uint32_t layer, uint32_t kind,
                  const void* source, uint64_t source_bytes) {
    if (kernel->is_sealed) {
        return BT_NOT_SEALED;
    }
    const Target target = target_of(*kernel, role, layer);
    // 0 also for a matrix wider than any that is packed.
    const uint64_t packed_bytes = bt_packed_bytes(kind, target.rows, target.columns);
    if (target.matrix == nullptr || target.matrix->data != nullptr || kind > BT_Q4_1 ||
        packed_bytes == 0 || source_bytes != target.rows * source_row_bytes(kind, target.columns)) {
        return BT_BAD_MATRIX;
    }
    uint8_t* place = kernel->weights.give(packed_bytes);
    if (place == nullptr) {
        return BT_NO_MEMORY;
    }
    Matrix matrix;
    matrix.data = place;
    matrix.kind = kind;
    matrix.rows = static_cast<int>(target.rows);
    matrix.columns = static_cast<int>(target.columns);
    matrix.tiles = (matrix.rows + kTileRows - 1) / kTileRows;
    matrix.tile_bytes = tile_bytes(kind, target.columns);
    pack_matrix(matrix, static_cast<const uint8_t*>(source), place);
    *target.matrix = matrix;
    return BT_OK;
}

int bt_set_vector(bt_kernel* kernel, uint32_t role, uint32_t layer, const float* weight,
                  uint64_t items) {
    if (kernel->is_sealed) {
        return BT_NOT_SEALED;
    }
    const VectorTarget target = vector_of(*kernel, role, layer);
    if (target.place == nullptr || items != target.items) {
        return BT_BAD_MATRIX;
    }
    if (role == BT_FINAL_NORM) {
        kernel->has_final_norm = true;
    } else {
        kernel->layers[layer].vectors |= 1u << role;
    }
    memcpy(target.place, weight, items * sizeof(float));
    return BT_OK;
}

int bt_set_rope(bt_kernel* kernel, const float* cosine, const float* sine, uint64_t items) {
    const bt_config& c = kernel->config;
    if (kernel->is_sealed || items != static_cast<uint64_t>(c.max_context) * (c.rotary_dim / 2)) {
        return kernel->is_sealed ? BT_NOT_SEALED : BT_BAD_MATRIX;
    }
    memcpy(kernel->cosine, cosine, items * sizeof(float));
    memcpy(kernel->sine, sine, items * sizeof(float));
    kernel->has_rope = true;
    return BT_OK;
}

int bt_set_pages(bt_kernel* kernel, void* base, uint64_t slot_bytes, uint64_t pages) {
    if (base == nullptr || pages == 0 || pages > INT32_MAX || slot_bytes < kernel->page_bytes() ||
        slot_bytes % 4 != 0 || reinterpret_cast<uintptr_t>(base) % 4 != 0) {
        return BT_BAD_SHAPE;
    }
    kernel->pages = static_cast<uint8_t*>(base);
    kernel->slot_bytes = slot_bytes;
    kernel->page_count = pages;
    return BT_OK;
}

int bt_seal(bt_kernel* kernel) {
    if (kernel->is_sealed) {
        return BT_NOT_SEALED;
    }
    if (!is_complete(*kernel)) {
        return BT_INCOMPLETE;
    }
    note_forms(*kernel);
    kernel->workers = new (std::nothrow) Worker[kernel->config.threads]();
    if (kernel->workers == nullptr) {
        return BT_NO_MEMORY;
    }
    Taker sizing(nullptr);
    take_buffers(sizing, *kernel, kernel->workers);
    if (!kernel->buffers.take(sizing.bytes())) {
        return BT_NO_MEMORY;
    }
    Taker placing(&kernel->buffers);
    take_buffers(placing, *kernel, kernel->workers);
    const int threads = static_cast<int>(kernel->config.threads);
    if (!placing.is_complete() || !kernel->threads.start(threads, run_step, kernel)) {
        return BT_NO_MEMORY;
    }
    kernel->is_sealed = true;
    return BT_OK;
}

void bt_memory_use(const bt_kernel* kernel, bt_memory* memory) {
    const size_t stacks = (kernel->config.threads - 1) * Threads::kStackBytes;
    memory->weight_bytes = kernel->weights.bytes() + kernel->norms.bytes();
    memory->buffer_bytes = kernel->buffers.bytes() + stacks;
}

uint8_t* bt_weight_memory(bt_kernel* kernel, uint64_t* bytes) {
    *bytes = kernel->config.weight_bytes;
    return kernel->weights.base();
}
