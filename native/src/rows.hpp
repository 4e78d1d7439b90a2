// Everything done to one row of floats: norm, rotation, SiLU, and the forms matrices take as input.
//
// Included once per instruction set, after its vec_*.hpp.
#pragma once

#include "table.hpp"

namespace bt {
namespace {

inline float square_root(float x) {
    return __builtin_sqrtf(x);
}

// e^x within 2 units in the last place; below -87 it is as good as zero.
inline Vf vf_exp(Vf x) {
    x = vf_min(vf_max(x, vf_set1(-87.0f)), vf_set1(88.0f));
    const Vf n = vf_round(vf_mul(x, vf_set1(1.44269504f)));
    Vf r = vf_fma(n, vf_set1(-0.693359375f), x);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    Vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set1(1.0f));
    return vf_scale2(p, n);
}

inline float exp_one(float x) {
    float lanes[16];
    vf_store(lanes, vf_exp(vf_set1(x)));
    return lanes[0];
}

// The last lanes of a row whose length is no multiple of 16, zero filled.
inline Vf load_tail(const float* x, int count) {
    float lanes[16] = {};
    for (int i = 0; i < count; ++i) {
        lanes[i] = x[i];
    }
    return vf_load(lanes);
}

inline void store_tail(float* out, Vf x, int count) {
    float lanes[16];
    vf_store(lanes, x);
    for (int i = 0; i < count; ++i) {
        out[i] = lanes[i];
    }
}

void rms_norm(const float* x, const float* weight, float* out, int n, float eps) {
    Vf sums = vf_zero();
    const int whole = n / 16 * 16;
    for (int i = 0; i < whole; i += 16) {
        const Vf v = vf_load(x + i);
        sums = vf_fma(v, v, sums);
    }
    const Vf last = load_tail(x + whole, n - whole);
    sums = vf_fma(last, last, sums);
    const float mean = vf_hsum(sums) / static_cast<float>(n);
    const Vf scale = vf_set1(1.0f / square_root(mean + eps));
    for (int i = 0; i < whole; i += 16) {
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(weight + i)));
    }
    const Vf tail = vf_mul(vf_mul(last, scale), load_tail(weight + whole, n - whole));
    store_tail(out + whole, tail, n - whole);
}

// Half-split RoPE: element i turns with element i + rotary_dim / 2; the result times `scale`.
void rotate(const RotateJob& job) {
    const float* x = job.x;
    const int half = job.rotary_dim / 2;
    int i = 0;
    const Vf by = vf_set1(job.scale);
    for (; i + 16 <= half; i += 16) {
        const Vf a = vf_load(x + i), b = vf_load(x + half + i);
        const Vf c = vf_load(job.cosine + i), s = vf_load(job.sine + i);
        vf_store(job.out + i, vf_mul(vf_sub(vf_mul(a, c), vf_mul(b, s)), by));
        vf_store(job.out + half + i, vf_mul(vf_add(vf_mul(b, c), vf_mul(a, s)), by));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        job.out[i] = (a * job.cosine[i] - b * job.sine[i]) * job.scale;
        job.out[half + i] = (b * job.cosine[i] + a * job.sine[i]) * job.scale;
    }
    for (i = job.rotary_dim; i < job.head_dim; ++i) {
        job.out[i] = x[i] * job.scale;
    }
}

void silu_mul(const float* gate, const float* up, float* out, int n) {
    const Vf one = vf_set1(1.0f), zero = vf_zero();
    for (int i = 0; i < n; i += 16) {
        const bool is_whole = i + 16 <= n;
        const Vf g = is_whole ? vf_load(gate + i) : load_tail(gate + i, n - i);
        const Vf u = is_whole ? vf_load(up + i) : load_tail(up + i, n - i);
        const Vf silu = vf_div(g, vf_add(one, vf_exp(vf_sub(zero, g))));
        if (is_whole) {
            vf_store(out + i, vf_mul(silu, u));
        } else {
            store_tail(out + i, vf_mul(silu, u), n - i);
        }
    }
}

inline void prepare_f32(const PrepareJob& job) {
    const int width = job.group.width;
    float* out = job.target->f32 + static_cast<size_t>(job.group.first) * job.columns + job.index;
    for (int k = 0; k < job.columns; ++k) {
        out[static_cast<size_t>(k) * width] = job.x[k];
    }
}

inline void prepare_bf16(const PrepareJob& job) {
    const int width = job.group.width, pairs = job.columns / 2;
    uint32_t* out = job.target->bf16 + static_cast<size_t>(job.group.first) * pairs + job.index;
    int k = 0;
    for (; k + 8 <= pairs; k += 8) {
        uint16_t halves[16];
        vf_store_bf16(halves, vf_load(job.x + 2 * k));
        for (int i = 0; i < 8; ++i) {
            out[static_cast<size_t>(k + i) * width] =
                halves[2 * i] | static_cast<uint32_t>(halves[2 * i + 1]) << 16;
        }
    }
    for (; k < pairs; ++k) {
        out[static_cast<size_t>(k) * width] =
            float_bf16(job.x[2 * k]) | static_cast<uint32_t>(float_bf16(job.x[2 * k + 1])) << 16;
    }
}

inline void put_int16(Vi low, Vi high, int32_t* out, int width) {
    if (width == 1) {
        vi_store_i16(reinterpret_cast<int16_t*>(out), low);
        vi_store_i16(reinterpret_cast<int16_t*>(out) + 16, high);
        return;
    }
    int32_t pairs[kBlock / 2];
    int16_t words[kBlock];
    vi_store_i16(words, low);
    vi_store_i16(words + 16, high);
    memcpy(pairs, words, sizeof pairs);
    for (int i = 0; i < kBlock / 2; ++i) {
        out[i * width] = pairs[i];
    }
}

// Bytes stand as k, k+2, k+1, k+3 in a dword, as the weights do.
inline void put_int8(Vi low, Vi high, int32_t* out, int width) {
    int8_t bytes[kBlock];
    vi_store_i8(bytes, low);
    vi_store_i8(bytes + 16, high);
    for (int i = 0; i < kBlock / 4; ++i) {
        const int8_t quad[4] = {bytes[4 * i], bytes[4 * i + 2], bytes[4 * i + 1], bytes[4 * i + 3]};
        memcpy(out + i * width, quad, sizeof quad);
    }
}

// A scale per block of 32: the largest magnitude becomes the largest integer.
inline void prepare_integer(const PrepareJob& job) {
    const int width = job.group.width, blocks = job.columns / kBlock;
    const int dwords = job.is_int8 ? kBlock / 4 : kBlock / 2;
    const size_t at = static_cast<size_t>(job.group.first) * blocks + job.index;
    int32_t* q = job.target->q + static_cast<size_t>(job.group.first) * blocks * dwords + job.index;
    const float limit = job.is_int8 ? 127.0f : 32767.0f;
    for (int k = 0; k < blocks; ++k, q += dwords * width) {
        const Vf x0 = vf_load(job.x + k * kBlock), x1 = vf_load(job.x + k * kBlock + 16);
        const float largest = vf_hmax(vf_max(vf_abs(x0), vf_abs(x1)));
        // Too small to invert is zero; this also keeps NaN from becoming an integer's business.
        const bool is_usable = largest > 1e-30f && largest < 1e30f;
        const Vf inverse = vf_set1(is_usable ? limit / largest : 0.0f);
        const Vi i0 = vf_to_i(vf_mul(x0, inverse)), i1 = vf_to_i(vf_mul(x1, inverse));
        const int isum = vi_hsum(vi_add(i0, i1));
        const float scale = is_usable ? largest / limit : largest <= 1e-30f ? 0.0f : largest;
        const size_t here = at + static_cast<size_t>(k) * width;
        job.target->scale[here] = scale;
        job.target->sum[here] = scale * static_cast<float>(isum);
        job.target->isum[here] = isum;
        if (job.is_int8) {
            put_int8(i0, i1, q, width);
        } else {
            put_int16(i0, i1, q, width);
        }
    }
}

void prepare(const PrepareJob& job) {
    if (job.forms & kFormF32) {
        prepare_f32(job);
    }
    if (job.forms & kFormBf16) {
        prepare_bf16(job);
    }
    if (job.forms & kFormInteger) {
        prepare_integer(job);
    }
}

}  // namespace
}  // namespace bt
