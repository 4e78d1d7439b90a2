// One step: the whole token through all layers for every sequence of the batch.
//
// Every thread runs run_step; phases are separated by barriers, five a layer. What two threads need
// both (norms, merged attention, quantised inputs) each computes for itself while the batch is
// small, because that is cheaper than a barrier. Sums never depend on threads or batch.
//
// A family of models is a specialisation of StepThread: what it adds to Llama costs the others
// nothing. Biases are added in project(), heads are normalised in head_of(); the phases stay.
#include <cmath>
#include <cstring>

#include <time.h>

#include "crc32c.hpp"
#include "kernel.hpp"

namespace bt {
namespace {

enum Phase { kEmbed, kProject, kAttend, kOutput, kGateUp, kDown, kHead, kChecksum, kWait, kTotal };
static_assert(kTotal + 1 == BT_PHASES);

uint64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

struct Range {
    int first;
    int end;
};

// One thread's view of a step of a model with biases of Q, K and V, or with norms of Q's and K's
// heads.
template <bool kHasBias, bool kHasHeadNorm>
class StepThread {
  public:
    StepThread(bt_kernel& kernel, int thread)
        : kernel_(kernel),
          config_(kernel.config),
          step_(kernel.step),
          worker_(kernel.workers[thread]),
          table_(*kernel.table),
          thread_(thread),
          threads_(kernel.threads.count()),
          since_(thread == 0 ? now_ns() : 0) {}

    void run() {
        const uint64_t begun = since_;
        embed();
        lap(kEmbed);
        wait();
        for (int layer = 0; layer < static_cast<int>(config_.layers); ++layer) {
            run_layer(layer);
        }
        checksum();
        lap(kChecksum);
        head();
        lap(kHead);
        if (thread_ == 0) {
            kernel_.profile[kTotal] += since_ - begun;
        }
    }

  private:
    void run_layer(int index) {
        const Layer& layer = kernel_.layers[index];
        project(layer);
        lap(kProject);
        wait();
        attend_layer(index);
        lap(kAttend);
        wait();
        output(layer);
        lap(kOutput);
        wait();
        gate_up(layer);
        lap(kGateUp);
        wait();
        down(layer);
        lap(kDown);
        wait();
    }

    // --- small helpers ---

    void lap(Phase phase) {
        if (thread_ == 0) {
            const uint64_t now = now_ns();
            kernel_.profile[phase] += now - since_;
            since_ = now;
        }
    }

    void wait() {
        kernel_.threads.barrier();
        lap(kWait);
    }

    Range share(int count) const {
        return {static_cast<int>(static_cast<int64_t>(count) * thread_ / threads_),
                static_cast<int>(static_cast<int64_t>(count) * (thread_ + 1) / threads_)};
    }

    float* hidden(int b) const { return kernel_.hidden + static_cast<size_t>(b) * config_.hidden; }

    float* projected(int b) const {
        return kernel_.projected + static_cast<size_t>(b * kernel_.projected_width());
    }

    float* inner(int b) const {
        return kernel_.inner + static_cast<size_t>(b) * config_.intermediate;
    }

    float* partial(int b, int head, int chunk) const {
        const size_t row =
            (static_cast<size_t>(b) * kChunksMax + static_cast<size_t>(chunk)) * config_.heads +
            static_cast<size_t>(head);
        return kernel_.partials + row * static_cast<size_t>(kernel_.partial_stride);
    }

    // Bring every sequence's row into the forms that matrices read. `row_of(b)` returns the row.
    template <typename RowOf>
    const Activations& prepare(int columns, unsigned forms, RowOf row_of) {
        Activations& target = step_.is_shared ? kernel_.shared : worker_.activations;
        const Range mine = step_.is_shared ? share(step_.batch) : Range{0, step_.batch};
        PrepareJob job = {};
        job.columns = columns;
        job.forms = forms;
        job.is_int8 = config_.activation == BT_ACT_INT8;
        job.target = &target;
        for (int g = 0; g < step_.group_count; ++g) {
            job.group = step_.groups[g];
            for (job.index = 0; job.index < job.group.width; ++job.index) {
                const int b = job.group.first + job.index;
                if (b >= mine.first && b < mine.end) {
                    job.x = row_of(b);
                    table_.prepare(job);
                }
            }
        }
        if (step_.is_shared) {
            wait();
        }
        return target;
    }

    const Activations& prepare_normed(const float* weight, unsigned forms) {
        const int columns = static_cast<int>(config_.hidden);
        return prepare(columns, forms, [&](int b) {
            table_.rms_norm(hidden(b), weight, worker_.row, columns, config_.rms_eps);
            return worker_.row;
        });
    }

    // Results of one tile for the batch: [batch][16] in `out`.
    void tile(const Matrix& matrix, int index, const Activations& input, float* out) const {
        TileJob job = {};
        job.tile = matrix.data + matrix.tile_bytes * static_cast<size_t>(index);
        job.columns = matrix.columns;
        job.input = &input;
        job.groups = step_.groups;
        job.group_count = step_.group_count;
        job.out = out;
        const bool is_int8 = config_.activation == BT_ACT_INT8 && matrix.kind >= BT_INT8;
        (is_int8 ? table_.tile_int8 : table_.tile)[matrix.kind](job);
    }

    static int rows_of(const Matrix& matrix, int index) {
        const int left = matrix.rows - index * kTileRows;
        return left < kTileRows ? left : kTileRows;
    }

    // --- phases ---

    void embed() {
        const Range mine = share(step_.batch);
        for (int b = mine.first; b < mine.end; ++b) {
            unpack_row(kernel_.embedding, step_.tokens[b], hidden(b));
        }
    }

    // Q, K and V side by side, before rotation.
    void project(const Layer& layer) {
        const Activations& input = prepare_normed(layer.attention_norm, layer.qkv_forms);
        const Matrix* matrices[3] = {&layer.query, &layer.key, &layer.value};
        const Range mine = share(layer.query.tiles + layer.key.tiles + layer.value.tiles);
        int before = 0, column = 0;
        for (const Matrix* matrix : matrices) {
            for (int i = 0; i < matrix->tiles; ++i) {
                if (before + i >= mine.first && before + i < mine.end) {
                    tile(*matrix, i, input, worker_.tile);
                    put_projected(layer, column + i * kTileRows, rows_of(*matrix, i));
                }
            }
            before += matrix->tiles;
            column += matrix->rows;
        }
    }

    // One tile's `rows` results for the batch become columns of Q, K and V.
    void put_projected(const Layer& layer, int column, int rows) const {
        for (int b = 0; b < step_.batch; ++b) {
            float* target = projected(b) + column;
            const float* source = worker_.tile + b * kTileRows;
            if constexpr (kHasBias) {
                for (int r = 0; r < rows; ++r) {
                    target[r] = source[r] + layer.bias[column + r];
                }
            } else {
                memcpy(target, source, sizeof(float) * static_cast<size_t>(rows));
            }
        }
    }

    // The parts of all sequences and KV heads, dealt out by tokens: a part belongs to the thread in
    // whose share of all tokens its middle lies.
    void attend_layer(int layer) {
        int64_t total = 0;
        for (int b = 0; b < step_.batch; ++b) {
            total += step_.lengths[b];
        }
        total *= 2 * config_.kv_heads;
        const int64_t first = total * thread_ / threads_, end = total * (thread_ + 1) / threads_;
        int64_t before = 0;
        for (int b = 0; b < step_.batch; ++b) {
            const int length = step_.lengths[b], size = step_.chunk_tokens[b];
            for (int head = 0; head < static_cast<int>(config_.kv_heads); ++head) {
                for (int chunk = 0, from = 0; from < length; ++chunk, from += size) {
                    const int to = from + size < length ? from + size : length;
                    const int64_t middle = before + (to - from);
                    before += 2 * (to - from);
                    if (middle >= first && middle < end) {
                        attend_part(layer, b, head, chunk, {from, to});
                    }
                }
            }
        }
    }

    void attend_part(int layer, int b, int head, int chunk, Range positions) {
        const int dim = static_cast<int>(config_.head_dim), position = step_.positions[b];
        const size_t turn = static_cast<size_t>(position) * (config_.rotary_dim / 2);
        const Layer& weights = kernel_.layers[layer];
        const float* row = projected(b);
        RotateJob rotation = {};
        rotation.cosine = kernel_.cosine + turn;
        rotation.sine = kernel_.sine + turn;
        rotation.scale = 1.0f / std::sqrt(static_cast<float>(dim));
        rotation.rotary_dim = static_cast<int>(config_.rotary_dim);
        rotation.head_dim = dim;
        for (int g = 0; g < kernel_.group; ++g) {
            rotation.x = head_of(row + (head * kernel_.group + g) * dim, weights.query_norm);
            rotation.out = worker_.query + g * dim;
            table_.rotate(rotation);
        }
        if (positions.end == step_.lengths[b]) {
            // Only this part reads the new slot, so nobody else can see it half written.
            rotation.x = head_of(row + kernel_.query_width() + head * dim, weights.key_norm);
            rotation.scale = 1.0f;
            rotation.out = worker_.turned;
            table_.rotate(rotation);
            const float* value = row + kernel_.query_width() + kernel_.kv_width() + head * dim;
            store(worker_.turned, b, layer, 0, head);
            store(value, b, layer, 1, head);
        }
        AttendJob job = {};
        job.base = kernel_.pages;
        job.slot_bytes = kernel_.slot_bytes;
        job.table = step_.tables[b];
        job.k_offset = kernel_.kv_offset(layer, 0, head);
        job.v_offset = kernel_.kv_offset(layer, 1, head);
        job.k_scales = kernel_.scale_offset(layer, 0, head);
        job.v_scales = kernel_.scale_offset(layer, 1, head);
        job.block_tokens = static_cast<int>(config_.block_tokens);
        job.head_dim = dim;
        job.first = positions.first;
        job.last = positions.end;
        job.length = step_.lengths[b];
        job.group = kernel_.group;
        job.query = worker_.query;
        job.scores = worker_.scores;
        job.score_stride = kernel_.score_stride;
        job.partial = partial(b, head * kernel_.group, chunk);
        job.partial_stride = kernel_.partial_stride;
        job.prefetch_pages = static_cast<int>(config_.prefetch_pages);
        table_.attend[config_.kv](job);
    }

    // A head of Q or K as it is turned: normalised where the family does so.
    const float* head_of(const float* x, const float* weight) const {
        if constexpr (kHasHeadNorm) {
            const int dim = static_cast<int>(config_.head_dim);
            table_.rms_norm(x, weight, worker_.row, dim, config_.rms_eps);
            return worker_.row;
        }
        return x;
    }

    void store(const float* x, int b, int layer, int part, int head) const {
        float* scale = config_.kv == BT_KV_INT8 ? slot_scale(b, layer, part, head) : nullptr;
        table_.store_kv[config_.kv](x, slot(b, layer, part, head), scale,
                                    static_cast<int>(config_.head_dim));
    }

    // Where the new token's K (part 0) or V (part 1) of a head stands.
    uint8_t* slot(int b, int layer, int part, int head) const {
        const size_t inside = slot_of(b) * config_.head_dim;
        return page_of(b) + kernel_.kv_offset(layer, part, head) + inside * kernel_.item_bytes();
    }

    // The same of its scale, in int8 pages.
    float* slot_scale(int b, int layer, int part, int head) const {
        uint8_t* scales = page_of(b) + kernel_.scale_offset(layer, part, head);
        return reinterpret_cast<float*>(scales) + slot_of(b);
    }

    uint8_t* page_of(int b) const {
        const int block = static_cast<int>(config_.block_tokens);
        const size_t page = static_cast<size_t>(step_.tables[b][step_.positions[b] / block]);
        return kernel_.pages + page * kernel_.slot_bytes;
    }

    size_t slot_of(int b) const {
        return static_cast<size_t>(step_.positions[b]) % config_.block_tokens;
    }

    const float* merged(int b) {
        const int dim = static_cast<int>(config_.head_dim);
        const int size = step_.chunk_tokens[b];
        MergeJob job = {};
        job.partial_stride = kernel_.partial_stride * static_cast<int>(config_.heads);
        job.chunks = (step_.lengths[b] + size - 1) / size;
        job.head_dim = dim;
        for (int head = 0; head < static_cast<int>(config_.heads); ++head) {
            job.partial = partial(b, head, 0);
            job.out = worker_.row + head * dim;
            table_.merge(job);
        }
        return worker_.row;
    }

    // hidden += matrix x input, by tiles of rows.
    void add_product(const Matrix& matrix, const Activations& input) {
        const Range mine = share(matrix.tiles);
        for (int i = mine.first; i < mine.end; ++i) {
            tile(matrix, i, input, worker_.tile);
            const int rows = rows_of(matrix, i);
            for (int b = 0; b < step_.batch; ++b) {
                float* target = hidden(b) + i * kTileRows;
                for (int r = 0; r < rows; ++r) {
                    target[r] += worker_.tile[b * kTileRows + r];
                }
            }
        }
    }

    void output(const Layer& layer) {
        const Activations& input =
            prepare(kernel_.query_width(), layer.output_forms, [&](int b) { return merged(b); });
        add_product(layer.output, input);
    }

    void gate_up(const Layer& layer) {
        const Activations& input = prepare_normed(layer.feed_forward_norm, layer.gate_up_forms);
        const Range mine = share(layer.gate.tiles);
        float* up = worker_.tile + static_cast<size_t>(config_.batch_max) * kTileRows;
        for (int i = mine.first; i < mine.end; ++i) {
            tile(layer.gate, i, input, worker_.tile);
            tile(layer.up, i, input, up);
            const int rows = rows_of(layer.gate, i);
            for (int b = 0; b < step_.batch; ++b) {
                table_.silu_mul(worker_.tile + b * kTileRows, up + b * kTileRows,
                                inner(b) + i * kTileRows, rows);
            }
        }
    }

    void down(const Layer& layer) {
        const Activations& input = prepare(static_cast<int>(config_.intermediate), layer.down_forms,
                                           [&](int b) { return inner(b); });
        add_product(layer.down, input);
    }

    void checksum() {
        const Range mine = share(step_.batch);
        const size_t bytes = kernel_.item_bytes() * config_.head_dim;
        for (int b = mine.first; b < mine.end; ++b) {
            uint32_t crc = 0;
            if (config_.kv == BT_KV_INT8) {
                each_row([&](int layer, int part, int head) {
                    crc = crc32c(crc, slot_scale(b, layer, part, head), sizeof(float));
                });
            }
            each_row([&](int layer, int part, int head) {
                crc = crc32c(crc, slot(b, layer, part, head), bytes);
            });
            step_.slot_crcs[b] = crc;
        }
    }

    // Every (layer, K or V, head) in the order of the layout.
    template <typename F>
    void each_row(F&& f) const {
        for (int layer = 0; layer < static_cast<int>(config_.layers); ++layer) {
            for (int part = 0; part < 2; ++part) {
                for (int head = 0; head < static_cast<int>(config_.kv_heads); ++head) {
                    f(layer, part, head);
                }
            }
        }
    }

    void head() {
        const Activations& input = prepare_normed(kernel_.final_norm, kernel_.head_forms);
        const Matrix& matrix = kernel_.head;
        const Range mine = share(matrix.tiles);
        for (int b = 0; b < step_.batch; ++b) {
            worker_.best[b] = -INFINITY;
            worker_.token[b] = mine.first * kTileRows;
        }
        for (int i = mine.first; i < mine.end; ++i) {
            tile(matrix, i, input, worker_.tile);
            const int rows = rows_of(matrix, i);
            for (int b = 0; b < step_.batch; ++b) {
                const float* logits = worker_.tile + b * kTileRows;
                if (step_.logits != nullptr) {
                    memcpy(step_.logits + static_cast<size_t>(b) * config_.vocabulary +
                               static_cast<size_t>(i) * kTileRows,
                           logits, sizeof(float) * static_cast<size_t>(rows));
                }
                if (step_.needs_best) {
                    note_best(b, logits, rows, i * kTileRows);
                }
            }
        }
    }

    void note_best(int b, const float* logits, int rows, int first_token) const {
        for (int r = 0; r < rows; ++r) {
            if (logits[r] > worker_.best[b]) {
                worker_.best[b] = logits[r];
                worker_.token[b] = first_token + r;
            }
        }
    }

    bt_kernel& kernel_;
    const bt_config& config_;
    const Step& step_;
    Worker& worker_;
    const KernelTable& table_;
    int thread_;
    int threads_;
    uint64_t since_;
};

}  // namespace

// A family is chosen once a step.
void run_step(void* opaque, int thread) {
    bt_kernel& kernel = *static_cast<bt_kernel*>(opaque);
    const bool has_bias = kernel.config.has_qkv_bias != 0;
    if (kernel.config.has_qk_norm != 0) {
        has_bias ? StepThread<true, true>(kernel, thread).run()
                 : StepThread<false, true>(kernel, thread).run();
    } else {
        has_bias ? StepThread<true, false>(kernel, thread).run()
                 : StepThread<false, false>(kernel, thread).run();
    }
}

}  // namespace bt
