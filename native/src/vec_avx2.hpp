// Sixteen lanes in two AVX2 registers (AVX2, FMA, F16C).
#pragma once

#include <immintrin.h>

#include "half.hpp"

namespace {

// More sequences at once would spill: sixteen registers hold two per accumulator.
constexpr int kWidthMaxHere = 2;

struct Vf {
    __m256 a, b;
};
struct Vi {
    __m256i a, b;
};

inline Vf vf_zero() {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline Vf vf_set1(float x) {
    return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline Vf vf_load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void vf_store(float* p, Vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline Vf vf_add(Vf x, Vf y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline Vf vf_sub(Vf x, Vf y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline Vf vf_mul(Vf x, Vf y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline Vf vf_div(Vf x, Vf y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline Vf vf_fma(Vf x, Vf y, Vf z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Vf vf_max(Vf x, Vf y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline Vf vf_min(Vf x, Vf y) {
    return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline Vf vf_abs(Vf x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Vf vf_round(Vf x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline __m256 power2(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Vf vf_scale2(Vf x, Vf n) {
    return vf_mul(x, {power2(n.a), power2(n.b)});
}
inline float hsum8(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float vf_hsum(Vf x) {
    return hsum8(_mm256_add_ps(x.a, x.b));
}
inline float vf_hmax(Vf x) {
    const __m256 both = _mm256_max_ps(x.a, x.b);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline void vf_hsum4(float* out, Vf x, Vf y, Vf z, Vf w) {
    const __m256 xy = _mm256_hadd_ps(_mm256_add_ps(x.a, x.b), _mm256_add_ps(y.a, y.b));
    const __m256 zw = _mm256_hadd_ps(_mm256_add_ps(z.a, z.b), _mm256_add_ps(w.a, w.b));
    const __m256 all = _mm256_hadd_ps(xy, zw);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
inline __m128i load128(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline __m256 bf16_8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}
inline Vf vf_load_bf16(const uint16_t* p) {
    return {bf16_8(p), bf16_8(p + 8)};
}
inline Vf vf_load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
inline Vf vf_load_i8(const int8_t* p) {
    const __m128i bytes = load128(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void vf_store_bf16(uint16_t* p, Vf x) {
    float lanes[16];
    vf_store(lanes, x);
    for (int i = 0; i < 16; ++i) {
        p[i] = float_bf16(lanes[i]);
    }
}
inline void vf_store_f16(uint16_t* p, Vf x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, kMode));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, kMode));
}

inline Vi vi_zero() {
    return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
inline Vi vi_load(const void* p) {
    const __m256i* both = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(both), _mm256_loadu_si256(both + 1)};
}
inline Vf vi_to_f(Vi x) {
    return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
inline Vi vf_to_i(Vf x) {
    return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
inline int vi_hsum(Vi x) {
    const __m256i both = _mm256_add_epi32(x.a, x.b);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline Vi vi_add(Vi x, Vi y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline __m256i pack16(Vi x) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
}
inline void vi_store_i16(int16_t* p, Vi x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack16(x));
}
inline void vi_store_i8(int8_t* p, Vi x) {
    const __m256i words = pack16(x);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
template <int kShift>
inline Vi vi_nibble16(Vi x) {
    const __m256i mask = _mm256_set1_epi16(0xf);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, kShift), mask),
            _mm256_and_si256(_mm256_srli_epi16(x.b, kShift), mask)};
}
inline Vi vi_even16(Vi x) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(x.a, 8), 8),
            _mm256_srai_epi16(_mm256_slli_epi16(x.b, 8), 8)};
}
inline Vi vi_odd16(Vi x) {
    return {_mm256_srai_epi16(x.a, 8), _mm256_srai_epi16(x.b, 8)};
}
inline Vi vi_dot16(Vi acc, Vi w, int32_t x) {
    const __m256i pair = _mm256_set1_epi32(x);
    return vi_add(acc, {_mm256_madd_epi16(w.a, pair), _mm256_madd_epi16(w.b, pair)});
}
inline Vi vi_low_nibbles(Vi x) {
    const __m256i mask = _mm256_set1_epi8(0xf);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Vi vi_high_nibbles(Vi x) {
    return vi_low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
// At most 2 x 15 x 127 or 2 x 128 x 127: the 16-bit sums of maddubs never saturate here.
inline Vi vi_dot_nibbles(Vi acc, Vi w, int32_t x) {
    const __m256i quad = _mm256_set1_epi32(x), one = _mm256_set1_epi16(1);
    return vi_add(acc, {_mm256_madd_epi16(_mm256_maddubs_epi16(w.a, quad), one),
                        _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, quad), one)});
}
inline Vi vi_dot_s8(Vi acc, Vi w, int32_t x) {
    const __m256i quad = _mm256_set1_epi32(x), one = _mm256_set1_epi16(1);
    const __m256i low = _mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(quad, w.a));
    const __m256i high = _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(quad, w.b));
    return vi_add(acc, {_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one)});
}
inline Vi vi_start_s8(int32_t) {
    return vi_zero();
}
inline Vf vf_dot_bf16(Vf acc, Vi w, uint32_t x) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    const Vf low = {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
                    _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
    const Vf high = {_mm256_castsi256_ps(_mm256_and_si256(w.a, mask)),
                     _mm256_castsi256_ps(_mm256_and_si256(w.b, mask))};
    acc = vf_fma(low, vf_set1(bits_float(x << 16)), acc);
    return vf_fma(high, vf_set1(bits_float(x & 0xffff0000u)), acc);
}

}  // namespace
