// Attention of one KV head's query heads over a run of positions, straight from the pages.
//
// Included once per instruction set, after its vec_*.hpp and rows.hpp. Scores of the run first, one
// softmax over them, then the values: no rescaling, and two plain streams for the memory. Runs are
// merged in order, so the sums of a sequence do not depend on threads or batch.
#pragma once

#include "table.hpp"

namespace bt {
namespace {

struct KvF32 {
    static constexpr bool kHasScales = false;
    using Item = float;
    static Vf load(const Item* p) { return vf_load(p); }
    static void store(Item* p, Vf x) { vf_store(p, x); }
    static float one(Item x) { return x; }
    static Item to(float x) { return x; }
};
struct KvBf16 {
    static constexpr bool kHasScales = false;
    using Item = uint16_t;
    static Vf load(const Item* p) { return vf_load_bf16(p); }
    static void store(Item* p, Vf x) { vf_store_bf16(p, x); }
    static float one(Item x) { return bf16_float(x); }
    static Item to(float x) { return float_bf16(x); }
};
struct KvF16 {
    static constexpr bool kHasScales = false;
    using Item = uint16_t;
    static Vf load(const Item* p) { return vf_load_f16(p); }
    static void store(Item* p, Vf x) { vf_store_f16(p, x); }
    static float one(Item x) { return f16_float(x); }
    static Item to(float x) { return float_f16(x); }
};

// Elements without their scale; scores and weights are multiplied by that, a row at a time.
struct KvInt8 {
    static constexpr bool kHasScales = true;
    using Item = int8_t;
    static Vf load(const Item* p) { return vf_load_i8(p); }
    static float one(Item x) { return static_cast<float>(x); }
};

template <typename Kv>
void store_kv(const float* x, void* out, float*, int n) {
    typename Kv::Item* items = static_cast<typename Kv::Item*>(out);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        Kv::store(items + i, vf_load(x + i));
    }
    for (; i < n; ++i) {
        items[i] = Kv::to(x[i]);
    }
}

// The largest magnitude becomes 127; to nearest even, as baton.kv.convert.quantise.
void store_int8(const float* x, void* out, float* scale, int n) {
    int8_t* items = static_cast<int8_t*>(out);
    Vf best = vf_zero();
    const int whole = n / 16 * 16;
    for (int i = 0; i < whole; i += 16) {
        best = vf_max(best, vf_abs(vf_load(x + i)));
    }
    best = vf_max(best, vf_abs(load_tail(x + whole, n - whole)));
    *scale = vf_hmax(best) / 127.0f;
    // A scale that underflowed stands for a row of zeros.
    const bool is_usable = *scale > 0.0f && *scale < 1e38f;
    const Vf by = vf_set1(is_usable ? *scale : 1.0f);
    const Vf top = vf_set1(127.0f), bottom = vf_set1(-127.0f);
    for (int i = 0; i < n; i += 16) {
        const int count = n - i < 16 ? n - i : 16;
        Vf steps = vf_zero();
        if (is_usable) {
            steps = vf_div(count == 16 ? vf_load(x + i) : load_tail(x + i, count), by);
            steps = vf_max(vf_min(steps, top), bottom);
        }
        int8_t bytes[16];
        vi_store_i8(bytes, vf_to_i(steps));
        memcpy(items + i, bytes, static_cast<size_t>(count));
    }
}

inline void prefetch_row(const uint8_t* row, int bytes) {
    for (int at = 0; at < bytes; at += 64) {
        __builtin_prefetch(row + at, 0, 3);
    }
}

// A walk over the rows of K or of V through the page table. Each page names the one to prefetch
// meanwhile: further on in the same walk; past its end, the first of V after K and, after V, K of
// the positions that follow, which the same thread mostly takes next.
template <typename Kv>
struct Rows {
    using Item = typename Kv::Item;

    Rows(const AttendJob& job, bool is_key)
        : job_(job),
          offset_(is_key ? job.k_offset : job.v_offset),
          is_key_(is_key),
          row_bytes_(job.head_dim * static_cast<int>(sizeof(Item))) {}

    // Call f(rows of the page from its first used slot, index of that row in the run, how many,
    // rows to prefetch or null).
    template <typename F>
    void each_page(F&& f) const {
        int position = job_.first;
        while (position < job_.last) {
            const int page = position / job_.block_tokens;
            const int slot = position - page * job_.block_tokens;
            const int left = job_.last - position;
            const int count = job_.block_tokens - slot < left ? job_.block_tokens - slot : left;
            const Item* rows = reinterpret_cast<const Item*>(at(page, offset_)) +
                               static_cast<size_t>(slot) * job_.head_dim;
            f(rows, position - job_.first, count, ahead(page));
            position += count;
        }
    }

    int row_bytes() const { return row_bytes_; }

  private:
    const uint8_t* at(int page, size_t offset) const {
        return job_.base + static_cast<size_t>(job_.table[page]) * job_.slot_bytes + offset;
    }
    const uint8_t* ahead(int page) const {
        if (job_.prefetch_pages == 0) {
            return nullptr;
        }
        const int next = page + job_.prefetch_pages;
        const int past = next - (job_.last - 1) / job_.block_tokens - 1;
        if (past < 0) {
            return at(next, offset_);
        }
        const int first = is_key_ ? job_.first / job_.block_tokens + past : next;
        const int end = is_key_ ? job_.last : job_.length;
        const bool is_there = first * job_.block_tokens < end;
        return is_there ? at(first, is_key_ ? job_.v_offset : job_.k_offset) : nullptr;
    }

    const AttendJob& job_;
    size_t offset_;
    bool is_key_;
    int row_bytes_;
};

// Scores of query heads [g0, g0 + G) against every key of the run.
template <typename Kv, int G>
inline void score(const AttendJob& job, int g0) {
    using Item = typename Kv::Item;
    const Rows<Kv> keys(job, true);
    const int dim = job.head_dim, row_bytes = keys.row_bytes();
    const float* query = job.query + g0 * dim;
    float* scores = job.scores + g0 * job.score_stride;
    keys.each_page([&](const Item* rows, int index, int count, const uint8_t* ahead) {
        for (int t = 0; t < count; t += 4) {
            if (ahead != nullptr) {
                prefetch_row(ahead + t * row_bytes, 4 * row_bytes);
            }
            // The last rows are read again rather than past the end; their scores are overwritten.
            const Item* k0 = rows + static_cast<size_t>(t) * dim;
            const Item* k1 = t + 1 < count ? k0 + dim : k0;
            const Item* k2 = t + 2 < count ? k1 + dim : k1;
            const Item* k3 = t + 3 < count ? k2 + dim : k2;
            Vf s[G][4];
            _Pragma("GCC unroll 4") for (int g = 0; g < G; ++g) {
                s[g][0] = s[g][1] = s[g][2] = s[g][3] = vf_zero();
            }
            for (int i = 0; i < dim; i += 16) {
                const Vf v0 = Kv::load(k0 + i), v1 = Kv::load(k1 + i);
                const Vf v2 = Kv::load(k2 + i), v3 = Kv::load(k3 + i);
                _Pragma("GCC unroll 4") for (int g = 0; g < G; ++g) {
                    const Vf q = vf_load(query + g * dim + i);
                    s[g][0] = vf_fma(q, v0, s[g][0]);
                    s[g][1] = vf_fma(q, v1, s[g][1]);
                    s[g][2] = vf_fma(q, v2, s[g][2]);
                    s[g][3] = vf_fma(q, v3, s[g][3]);
                }
            }
            _Pragma("GCC unroll 4") for (int g = 0; g < G; ++g) {
                float* out = scores + g * job.score_stride + index + t;
                vf_hsum4(out, s[g][0], s[g][1], s[g][2], s[g][3]);
            }
        }
    });
}

// Weighted sums of the values for query heads [g0, g0 + G), N vectors of the head at a time.
template <typename Kv, int G, int N>
inline void weigh(const AttendJob& job, int g0, int from) {
    using Item = typename Kv::Item;
    const Rows<Kv> values(job, false);
    const int dim = job.head_dim, row_bytes = values.row_bytes();
    const float* weights = job.scores + g0 * job.score_stride;
    Vf acc[G][N];
    _Pragma("GCC unroll 4") for (int g = 0; g < G; ++g) {
        _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) {
            acc[g][i] = vf_zero();
        }
    }
    values.each_page([&](const Item* rows, int index, int count, const uint8_t* ahead) {
        for (int t = 0; t < count; ++t) {
            if (ahead != nullptr) {
                prefetch_row(ahead + t * row_bytes, row_bytes);
            }
            const Item* row = rows + static_cast<size_t>(t) * dim + from;
            Vf v[N];
            _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) {
                v[i] = Kv::load(row + 16 * i);
            }
            _Pragma("GCC unroll 4") for (int g = 0; g < G; ++g) {
                const Vf p = vf_set1(weights[g * job.score_stride + index + t]);
                _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) {
                    acc[g][i] = vf_fma(p, v[i], acc[g][i]);
                }
            }
        }
    });
    _Pragma("GCC unroll 4") for (int g = 0; g < G; ++g) {
        float* out = job.partial + (g0 + g) * job.partial_stride + kPartialHead + from;
        _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) {
            vf_store(out + 16 * i, acc[g][i]);
        }
    }
}

// Multiply scores or weights of query heads [g0, g0 + count) by the scales of the run's rows.
inline void apply_scales(const AttendJob& job, int g0, int heads, size_t offset) {
    int position = job.first;
    while (position < job.last) {
        const int page = position / job.block_tokens;
        const int slot = position - page * job.block_tokens;
        const int left = job.last - position;
        const int count = job.block_tokens - slot < left ? job.block_tokens - slot : left;
        const uint8_t* at = job.base + static_cast<size_t>(job.table[page]) * job.slot_bytes;
        const float* scales = reinterpret_cast<const float*>(at + offset) + slot;
        for (int g = g0; g < g0 + heads; ++g) {
            float* scores = job.scores + g * job.score_stride + (position - job.first);
            for (int t = 0; t < count; ++t) {
                scores[t] *= scales[t];
            }
        }
        position += count;
    }
}

// Turn the scores of one query head into weights; its maximum and sum head the partial result.
inline void soften(const AttendJob& job, int g) {
    const int count = job.last - job.first;
    float* scores = job.scores + g * job.score_stride;
    const int padded = (count + 15) / 16 * 16;
    for (int i = count; i < padded; ++i) {
        scores[i] = -1e30f;
    }
    Vf best = vf_set1(-1e30f);
    for (int i = 0; i < padded; i += 16) {
        best = vf_max(best, vf_load(scores + i));
    }
    const float maximum = vf_hmax(best);
    Vf sum = vf_zero();
    for (int i = 0; i < padded; i += 16) {
        Vf p = vf_exp(vf_sub(vf_load(scores + i), vf_set1(maximum)));
        if (i + 16 > count) {
            p = load_tail((vf_store(scores + i, p), scores + i), count - i);
        }
        vf_store(scores + i, p);
        sum = vf_add(sum, p);
    }
    float* head = job.partial + g * job.partial_stride;
    head[0] = maximum;
    head[1] = vf_hsum(sum);
}

template <typename Kv, int G>
inline void attend_group(const AttendJob& job, int g0) {
    score<Kv, G>(job, g0);
    if constexpr (Kv::kHasScales) {
        apply_scales(job, g0, G, job.k_scales);
    }
    for (int g = g0; g < g0 + G; ++g) {
        soften(job, g);
    }
    if constexpr (Kv::kHasScales) {
        apply_scales(job, g0, G, job.v_scales);
    }
    int from = 0;
    for (; from + 64 <= job.head_dim; from += 64) {
        weigh<Kv, G, 4>(job, g0, from);
    }
    for (; from < job.head_dim; from += 16) {
        weigh<Kv, G, 1>(job, g0, from);
    }
}

// Heads whose width is no multiple of 16: plain loops, for tiny and odd models.
template <typename Kv>
void attend_scalar(const AttendJob& job) {
    const Rows<Kv> keys(job, true), values(job, false);
    using Item = typename Kv::Item;
    const int dim = job.head_dim;
    for (int g = 0; g < job.group; ++g) {
        const float* query = job.query + g * dim;
        float* scores = job.scores + g * job.score_stride;
        keys.each_page([&](const Item* rows, int index, int count, const uint8_t*) {
            for (int t = 0; t < count; ++t) {
                float sum = 0;
                for (int i = 0; i < dim; ++i) {
                    sum += query[i] * Kv::one(rows[static_cast<size_t>(t) * dim + i]);
                }
                scores[index + t] = sum;
            }
        });
        if constexpr (Kv::kHasScales) {
            apply_scales(job, g, 1, job.k_scales);
        }
        soften(job, g);
        if constexpr (Kv::kHasScales) {
            apply_scales(job, g, 1, job.v_scales);
        }
        float* out = job.partial + g * job.partial_stride + kPartialHead;
        memset(out, 0, sizeof(float) * static_cast<size_t>(dim));
        values.each_page([&](const Item* rows, int index, int count, const uint8_t*) {
            for (int t = 0; t < count; ++t) {
                for (int i = 0; i < dim; ++i) {
                    out[i] += scores[index + t] * Kv::one(rows[static_cast<size_t>(t) * dim + i]);
                }
            }
        });
    }
}

template <typename Kv>
void attend(const AttendJob& job) {
    if (job.head_dim % 16 != 0) {
        attend_scalar<Kv>(job);
        return;
    }
    int g = 0;
    for (; job.group - g >= 4; g += 4) {
        attend_group<Kv, 4>(job, g);
    }
    switch (job.group - g) {
        case 3:
            attend_group<Kv, 3>(job, g);
            break;
        case 2:
            attend_group<Kv, 2>(job, g);
            break;
        case 1:
            attend_group<Kv, 1>(job, g);
            break;
        default:
            break;
    }
}

// Join one query head's partial results, oldest positions first.
void merge(const MergeJob& job) {
    float maximum = job.partial[0];
    for (int c = 1; c < job.chunks; ++c) {
        const float other = job.partial[static_cast<size_t>(c) * job.partial_stride];
        maximum = other > maximum ? other : maximum;
    }
    float weights[kChunksMax];
    float sum = 0;
    for (int c = 0; c < job.chunks; ++c) {
        const float* partial = job.partial + static_cast<size_t>(c) * job.partial_stride;
        weights[c] = exp_one(partial[0] - maximum);
        sum += weights[c] * partial[1];
    }
    for (int i = 0; i < job.head_dim; i += 16) {
        const int count = job.head_dim - i < 16 ? job.head_dim - i : 16;
        Vf acc = vf_zero();
        for (int c = 0; c < job.chunks; ++c) {
            const float* partial = job.partial + static_cast<size_t>(c) * job.partial_stride;
            const float* values = partial + kPartialHead + i;
            const Vf v = count == 16 ? vf_load(values) : load_tail(values, count);
            acc = vf_fma(v, vf_set1(weights[c] / sum), acc);
        }
        if (count == 16) {
            vf_store(job.out + i, acc);
        } else {
            store_tail(job.out + i, acc, count);
        }
    }
}

}  // namespace
}  // namespace bt
