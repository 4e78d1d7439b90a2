// Throws wrong and right steps at the C interface of a small kernel, by seed.
//
// Run under AddressSanitizer: pages, tables and outputs are exact heap blocks, so that one byte out
// of bounds ends the program. Usage: fuzz_step [steps] [seed].
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "baton_step.h"

namespace {

constexpr uint32_t kPages = 11;

[[noreturn]] void fail(const char* what, int code) {
    std::fprintf(stderr, "fuzz_step: %s: %d\n", what, code);
    std::exit(1);
}

void expect(int code, const char* what) {
    if (code != BT_OK) {
        fail(what, code);
    }
}

// `family` counts through what families add: biases, norms of heads, RoPE over a part of a head.
bt_config make_config(uint32_t kv, uint32_t isa, uint32_t activation, uint32_t family) {
    bt_config config = {};
    config.layers = 2;
    config.hidden = 64;
    config.heads = 4;
    config.kv_heads = 2;
    config.head_dim = 32;
    config.intermediate = 96;
    config.vocabulary = 50;
    config.max_context = 80;
    config.block_tokens = 8;
    config.kv = kv;
    config.activation = activation;
    config.isa = isa;
    config.batch_max = 64;
    config.threads = 2;
    config.prefetch_pages = 1;
    config.has_tied_head = 1;
    config.has_qkv_bias = family % 2;
    config.has_qk_norm = family / 2 % 2;
    config.rotary_dim = family % 3 == 0 ? 22 : config.head_dim;
    config.rms_eps = 1e-5f;
    return config;
}

struct Weight {
    uint32_t role;
    uint64_t rows, columns;
};

std::vector<Weight> layer_weights(const bt_config& c) {
    const uint64_t query = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    return {{BT_QUERY, query, c.hidden},
            {BT_KEY, kv, c.hidden},
            {BT_VALUE, kv, c.hidden},
            {BT_OUTPUT, c.hidden, query},
            {BT_GATE, c.intermediate, c.hidden},
            {BT_UP, c.intermediate, c.hidden},
            {BT_DOWN, c.hidden, c.intermediate}};
}

class Fuzzer {
  public:
    explicit Fuzzer(uint32_t seed) : random_(seed) {}

    void run(uint32_t kv, uint32_t isa, uint32_t kind, uint32_t family, int steps) {
        config_ = make_config(kv, isa, (kind + kv) % 2, family);
        config_.weight_bytes = bt_packed_bytes(kind, config_.vocabulary, config_.hidden);
        for (const Weight& weight : layer_weights(config_)) {
            config_.weight_bytes +=
                config_.layers * bt_packed_bytes(kind, weight.rows, weight.columns);
        }
        expect(bt_create(&config_, &kernel_), "create");
        fill(kind);
        for (int i = 0; i < steps; ++i) {
            step();
        }
        bt_destroy(kernel_);
    }

  private:
    uint32_t below(uint32_t limit) { return random_() % limit; }

    std::vector<float> floats(uint64_t count) {
        std::vector<float> values(count);
        for (float& value : values) {
            value = static_cast<float>(below(2001)) / 10000.0f - 0.1f;
        }
        return values;
    }

    void set(uint32_t role, uint32_t layer, uint32_t kind, uint64_t rows, uint64_t columns) {
        const std::vector<float> values = floats(rows * columns);
        uint64_t bytes = rows * columns * 4;
        if (kind >= BT_Q8_0) {
            // Any bytes are blocks; the scales are small halves.
            const uint64_t block = kind == BT_Q8_0 ? 34 : 20;
            bytes = rows * (columns / 32) * block;
            std::vector<uint8_t> blocks(bytes);
            for (uint64_t i = 0; i < bytes; ++i) {
                const uint64_t inside = i % block;
                const bool is_scale = inside < (kind == BT_Q8_0 ? 2u : 4u);
                blocks[i] = is_scale ? (inside % 2 ? 0x18 : 0x11) : static_cast<uint8_t>(random_());
            }
            // One byte less is another size: refused.
            if (bt_set_matrix(kernel_, role, layer, kind, blocks.data(), bytes - 1) !=
                BT_BAD_MATRIX) {
                fail("a short matrix was taken", static_cast<int>(role));
            }
            expect(bt_set_matrix(kernel_, role, layer, kind, blocks.data(), bytes), "matrix");
            return;
        }
        expect(bt_set_matrix(kernel_, role, layer, kind, values.data(), bytes), "matrix");
    }

    // A vector that this kernel has; one that it has not, or of another size, is refused.
    void set_vector(uint32_t role, uint32_t layer, uint64_t items, bool is_there) {
        const std::vector<float> values = floats(items);
        if (bt_set_vector(kernel_, role, layer, values.data(), items - 1) != BT_BAD_MATRIX) {
            fail("a short vector was taken", static_cast<int>(role));
        }
        const int code = bt_set_vector(kernel_, role, layer, values.data(), items);
        if (code != (is_there ? BT_OK : BT_BAD_MATRIX)) {
            fail("a vector", code);
        }
    }

    void fill(uint32_t kind) {
        set(BT_EMBEDDING, 0, kind, config_.vocabulary, config_.hidden);
        for (uint32_t layer = 0; layer < config_.layers; ++layer) {
            for (const Weight& weight : layer_weights(config_)) {
                set(weight.role, layer, kind, weight.rows, weight.columns);
            }
            set_vector(BT_ATTENTION_NORM, layer, config_.hidden, true);
            const bool has_bias = config_.has_qkv_bias != 0, has_norm = config_.has_qk_norm != 0;
            set_vector(BT_QUERY_BIAS, layer, config_.heads * config_.head_dim, has_bias);
            set_vector(BT_KEY_BIAS, layer, config_.kv_heads * config_.head_dim, has_bias);
            set_vector(BT_QUERY_NORM, layer, config_.head_dim, has_norm);
            set_vector(BT_KEY_NORM, layer, config_.head_dim, has_norm);
            if (bt_seal(kernel_) != BT_INCOMPLETE) {
                fail("sealed while incomplete", 0);
            }
            set_vector(BT_VALUE_BIAS, layer, config_.kv_heads * config_.head_dim, has_bias);
            set_vector(BT_FEED_FORWARD_NORM, layer, config_.hidden, true);
        }
        set_vector(BT_FINAL_NORM, 0, config_.hidden, true);
        const std::vector<float> turn(config_.max_context * config_.rotary_dim / 2, 0.7f);
        expect(bt_set_rope(kernel_, turn.data(), turn.data(), turn.size()), "rope");
        const uint64_t item = config_.kv == BT_KV_F32 ? 4 : config_.kv == BT_KV_INT8 ? 1 : 2;
        const uint64_t scale = config_.kv == BT_KV_INT8 ? 4 : 0;
        const uint64_t rows = 2 * config_.layers * config_.kv_heads * config_.block_tokens;
        const uint64_t page = rows * (item * config_.head_dim + scale);
        pages_.assign(kPages * page, 0);
        if (bt_set_pages(kernel_, pages_.data(), page - 4, kPages) != BT_BAD_SHAPE) {
            fail("short page slots were taken", 0);
        }
        expect(bt_set_pages(kernel_, pages_.data(), page, kPages), "pages");
        expect(bt_seal(kernel_), "seal");
    }

    // Mostly sound numbers, now and then anything.
    int32_t number(uint32_t limit) {
        return below(60) == 0 ? static_cast<int32_t>(random_())
                              : static_cast<int32_t>(below(limit));
    }

    void step() {
        const uint32_t batch = below(20) == 0 ? below(70) : 1 + below(3);
        std::vector<int32_t> tokens, positions, tables;
        std::vector<uint32_t> ends;
        for (uint32_t b = 0; b < batch; ++b) {
            tokens.push_back(number(config_.vocabulary));
            positions.push_back(number(config_.max_context));
            const uint32_t wanted = static_cast<uint32_t>(positions[b]) % 100 / 8 + 1;
            const uint32_t length = below(30) == 0 ? below(wanted) : wanted;
            for (uint32_t i = 0; i < length; ++i) {
                tables.push_back(number(kPages));
            }
            ends.push_back(static_cast<uint32_t>(tables.size()));
        }
        tables.shrink_to_fit();
        std::vector<float> logits(static_cast<size_t>(batch) * config_.vocabulary);
        std::vector<int32_t> best(batch);
        std::vector<uint32_t> crcs(batch);
        uint32_t culprit = 0;
        const bool has_logits = below(4) != 0, has_best = below(4) != 0;
        const int code = bt_step(kernel_, batch, tokens.data(), positions.data(), tables.data(),
                                 ends.data(), has_logits ? logits.data() : nullptr,
                                 has_best ? best.data() : nullptr, crcs.data(), &culprit);
        if (code > 0 || code < BT_SHARED_SLOT || code == BT_NOT_SEALED) {
            fail("an unexpected answer", code);
        }
        for (uint32_t b = 0; code == BT_OK && has_best && b < batch; ++b) {
            if (best[b] < 0 || static_cast<uint32_t>(best[b]) >= config_.vocabulary) {
                fail("a best token outside the vocabulary", best[b]);
            }
        }
    }

    std::mt19937 random_;
    bt_config config_ = {};
    bt_kernel* kernel_ = nullptr;
    std::vector<uint8_t> pages_;
};

}  // namespace

int main(int count, char** arguments) {
    const int steps = count > 1 ? std::atoi(arguments[1]) : 200;
    const uint32_t seed = count > 2 ? static_cast<uint32_t>(std::atoi(arguments[2])) : 1;
    Fuzzer fuzzer(seed);
    int runs = 0;
    for (uint32_t isa = BT_ISA_PORTABLE; isa <= BT_ISA_NEON; ++isa) {
        for (uint32_t kind = BT_F32; kind <= BT_Q4_1 && bt_resolve_isa(isa) >= 0; ++kind) {
            for (uint32_t kv = BT_KV_F16; kv <= BT_KV_INT8; ++kv, ++runs) {
                fuzzer.run(kv, isa, kind, static_cast<uint32_t>(runs), steps);
            }
        }
    }
    std::printf("fuzz_step: %d kernels, %d steps each, no fault\n", runs, steps);
    return 0;
}
