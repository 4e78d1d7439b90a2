// Sixteen lanes in plain C++: the correctness reference, and the path of CPUs without vectors.
#pragma once

#include <cmath>

#include "half.hpp"

namespace {

constexpr int kWidthMaxHere = 4;

struct Vf {
    float v[16];
};
struct Vi {
    int32_t v[16];
};

#define BT_LANES for (int i = 0; i < 16; ++i)

inline Vf vf_zero() {
    return Vf{};
}
inline Vf vf_set1(float x) {
    Vf r;
    BT_LANES r.v[i] = x;
    return r;
}
inline Vf vf_load(const float* p) {
    Vf r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
inline void vf_store(float* p, Vf a) {
    memcpy(p, a.v, sizeof a.v);
}
inline Vf vf_add(Vf a, Vf b) {
    BT_LANES a.v[i] += b.v[i];
    return a;
}
inline Vf vf_sub(Vf a, Vf b) {
    BT_LANES a.v[i] -= b.v[i];
    return a;
}
inline Vf vf_mul(Vf a, Vf b) {
    BT_LANES a.v[i] *= b.v[i];
    return a;
}
inline Vf vf_div(Vf a, Vf b) {
    BT_LANES a.v[i] /= b.v[i];
    return a;
}
inline Vf vf_fma(Vf a, Vf b, Vf c) {
    BT_LANES c.v[i] += a.v[i] * b.v[i];
    return c;
}
inline Vf vf_max(Vf a, Vf b) {
    BT_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline Vf vf_min(Vf a, Vf b) {
    BT_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline Vf vf_abs(Vf a) {
    BT_LANES a.v[i] = std::fabs(a.v[i]);
    return a;
}
inline Vf vf_round(Vf a) {
    BT_LANES a.v[i] = std::nearbyintf(a.v[i]);
    return a;
}
// a times 2^n for whole n in [-126, 127].
inline Vf vf_scale2(Vf a, Vf n) {
    BT_LANES a.v[i] *= bits_float(static_cast<uint32_t>(static_cast<int>(n.v[i]) + 127) << 23);
    return a;
}
inline float vf_hsum(Vf a) {
    float sum = 0;
    BT_LANES sum += a.v[i];
    return sum;
}
inline float vf_hmax(Vf a) {
    float best = a.v[0];
    BT_LANES best = a.v[i] > best ? a.v[i] : best;
    return best;
}
inline void vf_hsum4(float* out, Vf a, Vf b, Vf c, Vf d) {
    out[0] = vf_hsum(a);
    out[1] = vf_hsum(b);
    out[2] = vf_hsum(c);
    out[3] = vf_hsum(d);
}
inline Vf vf_load_bf16(const uint16_t* p) {
    Vf r;
    BT_LANES r.v[i] = bf16_float(p[i]);
    return r;
}
inline Vf vf_load_f16(const uint16_t* p) {
    Vf r;
    BT_LANES r.v[i] = f16_float(p[i]);
    return r;
}
inline Vf vf_load_i8(const int8_t* p) {
    Vf r;
    BT_LANES r.v[i] = static_cast<float>(p[i]);
    return r;
}
inline void vf_store_bf16(uint16_t* p, Vf a) {
    BT_LANES p[i] = float_bf16(a.v[i]);
}
inline void vf_store_f16(uint16_t* p, Vf a) {
    BT_LANES p[i] = float_f16(a.v[i]);
}

inline Vi vi_zero() {
    return Vi{};
}
inline Vi vi_load(const void* p) {
    Vi r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
inline Vf vi_to_f(Vi a) {
    Vf r;
    BT_LANES r.v[i] = static_cast<float>(a.v[i]);
    return r;
}
inline Vi vf_to_i(Vf a) {
    Vi r;
    BT_LANES r.v[i] = static_cast<int32_t>(std::nearbyintf(a.v[i]));
    return r;
}
inline int vi_hsum(Vi a) {
    int sum = 0;
    BT_LANES sum += a.v[i];
    return sum;
}
inline Vi vi_add(Vi a, Vi b) {
    BT_LANES a.v[i] += b.v[i];
    return a;
}
inline void vi_store_i16(int16_t* p, Vi a) {
    BT_LANES p[i] = static_cast<int16_t>(a.v[i]);
}
inline void vi_store_i8(int8_t* p, Vi a) {
    BT_LANES p[i] = static_cast<int8_t>(a.v[i]);
}

inline int32_t pair(uint32_t low, uint32_t high) {
    return static_cast<int32_t>((low & 0xffffu) | (high << 16));
}
template <int kShift>
inline Vi vi_nibble16(Vi a) {
    BT_LANES {
        const uint32_t bits = static_cast<uint32_t>(a.v[i]);
        a.v[i] = static_cast<int32_t>((bits >> kShift) & 0x000f000fu);
    }
    return a;
}
inline int32_t byte_of(int32_t dword, int index) {
    return static_cast<int8_t>(static_cast<uint32_t>(dword) >> (8 * index));
}
inline Vi vi_even16(Vi a) {
    BT_LANES a.v[i] =
        pair(static_cast<uint32_t>(byte_of(a.v[i], 0)), static_cast<uint32_t>(byte_of(a.v[i], 2)));
    return a;
}
inline Vi vi_odd16(Vi a) {
    BT_LANES a.v[i] =
        pair(static_cast<uint32_t>(byte_of(a.v[i], 1)), static_cast<uint32_t>(byte_of(a.v[i], 3)));
    return a;
}
inline Vi vi_dot16(Vi acc, Vi w, int32_t x) {
    const int low = static_cast<int16_t>(x), high = x >> 16;
    BT_LANES acc.v[i] += static_cast<int16_t>(w.v[i]) * low + (w.v[i] >> 16) * high;
    return acc;
}
inline Vi vi_low_nibbles(Vi a) {
    BT_LANES a.v[i] &= 0x0f0f0f0f;
    return a;
}
inline Vi vi_high_nibbles(Vi a) {
    BT_LANES a.v[i] = static_cast<int32_t>((static_cast<uint32_t>(a.v[i]) >> 4) & 0x0f0f0f0fu);
    return a;
}
inline Vi vi_dot_s8(Vi acc, Vi w, int32_t x) {
    BT_LANES {
        for (int j = 0; j < 4; ++j) {
            acc.v[i] += byte_of(w.v[i], j) * byte_of(x, j);
        }
    }
    return acc;
}
inline Vi vi_dot_nibbles(Vi acc, Vi w, int32_t x) {
    return vi_dot_s8(acc, w, x);
}
inline Vi vi_start_s8(int32_t) {
    return vi_zero();
}
inline Vf vf_dot_bf16(Vf acc, Vi w, uint32_t x) {
    const float low = bits_float(x << 16), high = bits_float(x & 0xffff0000u);
    BT_LANES {
        const uint32_t bits = static_cast<uint32_t>(w.v[i]);
        acc.v[i] += bits_float(bits << 16) * low;
        acc.v[i] += bits_float(bits & 0xffff0000u) * high;
    }
    return acc;
}

#undef BT_LANES

}  // namespace
