// Sixteen lanes in four NEON registers (AArch64).
#pragma once

#include <arm_neon.h>

#include "half.hpp"

namespace {

constexpr int kWidthMaxHere = 2;

struct Vf {
    float32x4_t v[4];
};
struct Vi {
    int32x4_t v[4];
};

#define BT_QUARTERS for (int i = 0; i < 4; ++i)

inline Vf vf_set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {{v, v, v, v}};
}
inline Vf vf_zero() {
    return vf_set1(0.0f);
}
inline Vf vf_load(const float* p) {
    return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline void vf_store(float* p, Vf a) {
    BT_QUARTERS vst1q_f32(p + 4 * i, a.v[i]);
}
inline Vf vf_add(Vf a, Vf b) {
    BT_QUARTERS a.v[i] = vaddq_f32(a.v[i], b.v[i]);
    return a;
}
inline Vf vf_sub(Vf a, Vf b) {
    BT_QUARTERS a.v[i] = vsubq_f32(a.v[i], b.v[i]);
    return a;
}
inline Vf vf_mul(Vf a, Vf b) {
    BT_QUARTERS a.v[i] = vmulq_f32(a.v[i], b.v[i]);
    return a;
}
inline Vf vf_div(Vf a, Vf b) {
    BT_QUARTERS a.v[i] = vdivq_f32(a.v[i], b.v[i]);
    return a;
}
inline Vf vf_fma(Vf a, Vf b, Vf c) {
    BT_QUARTERS c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
    return c;
}
inline Vf vf_max(Vf a, Vf b) {
    BT_QUARTERS a.v[i] = vmaxq_f32(a.v[i], b.v[i]);
    return a;
}
inline Vf vf_min(Vf a, Vf b) {
    BT_QUARTERS a.v[i] = vminq_f32(a.v[i], b.v[i]);
    return a;
}
inline Vf vf_abs(Vf a) {
    BT_QUARTERS a.v[i] = vabsq_f32(a.v[i]);
    return a;
}
inline Vf vf_round(Vf a) {
    BT_QUARTERS a.v[i] = vrndnq_f32(a.v[i]);
    return a;
}
inline Vf vf_scale2(Vf a, Vf n) {
    BT_QUARTERS {
        const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127));
        a.v[i] = vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    }
    return a;
}
inline float vf_hsum(Vf a) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])));
}
inline float vf_hmax(Vf a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
inline void vf_hsum4(float* out, Vf a, Vf b, Vf c, Vf d) {
    out[0] = vf_hsum(a);
    out[1] = vf_hsum(b);
    out[2] = vf_hsum(c);
    out[3] = vf_hsum(d);
}
inline Vf vf_load_bf16(const uint16_t* p) {
    Vf r;
    BT_QUARTERS r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    return r;
}
inline Vf vf_load_f16(const uint16_t* p) {
    Vf r;
    BT_QUARTERS r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return r;
}
inline Vf vf_load_i8(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline void vf_store_bf16(uint16_t* p, Vf a) {
    float lanes[16];
    vf_store(lanes, a);
    for (int i = 0; i < 16; ++i) {
        p[i] = float_bf16(lanes[i]);
    }
}
inline void vf_store_f16(uint16_t* p, Vf a) {
    BT_QUARTERS vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}

inline Vi vi_zero() {
    const int32x4_t v = vdupq_n_s32(0);
    return {{v, v, v, v}};
}
inline Vi vi_load(const void* p) {
    const int32_t* d = static_cast<const int32_t*>(p);
    return {{vld1q_s32(d), vld1q_s32(d + 4), vld1q_s32(d + 8), vld1q_s32(d + 12)}};
}
inline Vf vi_to_f(Vi a) {
    Vf r;
    BT_QUARTERS r.v[i] = vcvtq_f32_s32(a.v[i]);
    return r;
}
inline Vi vf_to_i(Vf a) {
    Vi r;
    BT_QUARTERS r.v[i] = vcvtnq_s32_f32(a.v[i]);
    return r;
}
inline Vi vi_add(Vi a, Vi b) {
    BT_QUARTERS a.v[i] = vaddq_s32(a.v[i], b.v[i]);
    return a;
}
inline int vi_hsum(Vi a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
inline void vi_store_i16(int16_t* p, Vi a) {
    BT_QUARTERS vst1_s16(p + 4 * i, vmovn_s32(a.v[i]));
}
inline void vi_store_i8(int8_t* p, Vi a) {
    int16_t words[16];
    vi_store_i16(words, a);
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<int8_t>(words[i]);
    }
}
template <int kShift>
inline Vi vi_nibble16(Vi a) {
    const int32x4_t mask = vdupq_n_s32(0x000f000f);
    BT_QUARTERS {
        if constexpr (kShift == 0) {
            a.v[i] = vandq_s32(a.v[i], mask);
        } else {
            const uint32x4_t bits = vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), kShift);
            a.v[i] = vandq_s32(vreinterpretq_s32_u32(bits), mask);
        }
    }
    return a;
}
inline Vi vi_even16(Vi a) {
    BT_QUARTERS {
        const int16x8_t words = vreinterpretq_s16_s32(a.v[i]);
        a.v[i] = vreinterpretq_s32_s16(vshrq_n_s16(vshlq_n_s16(words, 8), 8));
    }
    return a;
}
inline Vi vi_odd16(Vi a) {
    BT_QUARTERS {
        a.v[i] = vreinterpretq_s32_s16(vshrq_n_s16(vreinterpretq_s16_s32(a.v[i]), 8));
    }
    return a;
}
inline Vi vi_dot16(Vi acc, Vi w, int32_t x) {
    const int16x8_t pair = vreinterpretq_s16_s32(vdupq_n_s32(x));
    BT_QUARTERS {
        const int16x8_t words = vreinterpretq_s16_s32(w.v[i]);
        const int32x4_t low = vmull_s16(vget_low_s16(words), vget_low_s16(pair));
        const int32x4_t high = vmull_high_s16(words, pair);
        acc.v[i] = vaddq_s32(acc.v[i], vpaddq_s32(low, high));
    }
    return acc;
}
inline Vi vi_low_nibbles(Vi a) {
    BT_QUARTERS a.v[i] = vandq_s32(a.v[i], vdupq_n_s32(0x0f0f0f0f));
    return a;
}
inline Vi vi_high_nibbles(Vi a) {
    BT_QUARTERS {
        const uint32x4_t bits = vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), 4);
        a.v[i] = vandq_s32(vreinterpretq_s32_u32(bits), vdupq_n_s32(0x0f0f0f0f));
    }
    return a;
}
inline Vi vi_dot_s8(Vi acc, Vi w, int32_t x) {
    const int8x16_t quad = vreinterpretq_s8_s32(vdupq_n_s32(x));
    BT_QUARTERS {
        const int8x16_t bytes = vreinterpretq_s8_s32(w.v[i]);
        const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(quad));
        const int16x8_t high = vmull_high_s8(bytes, quad);
        const int32x4_t sums = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
        acc.v[i] = vaddq_s32(acc.v[i], sums);
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
    BT_QUARTERS {
        const uint32x4_t bits = vreinterpretq_u32_s32(w.v[i]);
        const float32x4_t first = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
        const float32x4_t second = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
        acc.v[i] = vfmaq_n_f32(vfmaq_n_f32(acc.v[i], first, low), second, high);
    }
    return acc;
}

#undef BT_QUARTERS

}  // namespace
