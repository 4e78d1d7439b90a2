// Sixteen lanes in one AVX-512 register (F, BW, VL, DQ, VNNI; BF16 where the compiler is told so).
#pragma once

#include <immintrin.h>

#include "half.hpp"

namespace {

constexpr int kWidthMaxHere = 8;

using Vf = __m512;
using Vi = __m512i;

inline Vf vf_zero() {
    return _mm512_setzero_ps();
}
inline Vf vf_set1(float x) {
    return _mm512_set1_ps(x);
}
inline Vf vf_load(const float* p) {
    return _mm512_loadu_ps(p);
}
inline void vf_store(float* p, Vf a) {
    _mm512_storeu_ps(p, a);
}
inline Vf vf_add(Vf a, Vf b) {
    return _mm512_add_ps(a, b);
}
inline Vf vf_sub(Vf a, Vf b) {
    return _mm512_sub_ps(a, b);
}
inline Vf vf_mul(Vf a, Vf b) {
    return _mm512_mul_ps(a, b);
}
inline Vf vf_div(Vf a, Vf b) {
    return _mm512_div_ps(a, b);
}
inline Vf vf_fma(Vf a, Vf b, Vf c) {
    return _mm512_fmadd_ps(a, b, c);
}
inline Vf vf_max(Vf a, Vf b) {
    return _mm512_max_ps(a, b);
}
inline Vf vf_min(Vf a, Vf b) {
    return _mm512_min_ps(a, b);
}
inline Vf vf_abs(Vf a) {
    return _mm512_abs_ps(a);
}
inline Vf vf_round(Vf a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vf vf_scale2(Vf a, Vf n) {
    return _mm512_scalef_ps(a, n);
}
inline float vf_hsum(Vf a) {
    return _mm512_reduce_add_ps(a);
}
inline float vf_hmax(Vf a) {
    return _mm512_reduce_max_ps(a);
}
inline void vf_hsum4(float* out, Vf a, Vf b, Vf c, Vf d) {
    const Vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const Vf abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
inline Vf vf_load_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vf vf_load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vf vf_load_i8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline void vf_store_bf16(uint16_t* p, Vf a) {
    const Vi bits = _mm512_castps_si512(a);
    const Vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Vi up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const Vi kept = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const Vi rounded = _mm512_srli_epi32(_mm512_mask_mov_epi32(up, is_nan, kept), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void vf_store_f16(uint16_t* p, Vf a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Vi vi_zero() {
    return _mm512_setzero_si512();
}
inline Vi vi_load(const void* p) {
    return _mm512_loadu_si512(p);
}
inline Vf vi_to_f(Vi a) {
    return _mm512_cvtepi32_ps(a);
}
inline Vi vf_to_i(Vf a) {
    return _mm512_cvtps_epi32(a);
}
inline int vi_hsum(Vi a) {
    return _mm512_reduce_add_epi32(a);
}
inline Vi vi_add(Vi a, Vi b) {
    return _mm512_add_epi32(a, b);
}
inline void vi_store_i16(int16_t* p, Vi a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
}
inline void vi_store_i8(int8_t* p, Vi a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
template <int kShift>
inline Vi vi_nibble16(Vi a) {
    const Vi shifted = kShift == 0 ? a : _mm512_srli_epi16(a, kShift);
    return kShift == 12 ? shifted : _mm512_and_si512(shifted, _mm512_set1_epi16(0xf));
}
inline Vi vi_even16(Vi a) {
    return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8);
}
inline Vi vi_odd16(Vi a) {
    return _mm512_srai_epi16(a, 8);
}
inline Vi vi_dot16(Vi acc, Vi w, int32_t x) {
    return _mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(x));
}
inline Vi vi_low_nibbles(Vi a) {
    return _mm512_and_si512(a, _mm512_set1_epi8(0xf));
}
inline Vi vi_high_nibbles(Vi a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(0xf));
}
inline Vi vi_dot_nibbles(Vi acc, Vi w, int32_t x) {
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x));
}
// Unsigned times signed is all there is: weights are read as w + 128, and the start takes it back.
inline Vi vi_dot_s8(Vi acc, Vi w, int32_t x) {
    return vi_dot_nibbles(acc, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x);
}
inline Vi vi_start_s8(int32_t isum) {
    return _mm512_set1_epi32(-128 * isum);
}
inline Vf vf_dot_bf16(Vf acc, Vi w, uint32_t x) {
#ifdef __AVX512BF16__
    const Vi pair = _mm512_set1_epi32(static_cast<int32_t>(x));
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(pair));
#else
    const Vi high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    acc = vf_fma(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), vf_set1(bits_float(x << 16)), acc);
    return vf_fma(_mm512_castsi512_ps(_mm512_and_si512(w, high)),
                  vf_set1(bits_float(x & 0xffff0000u)), acc);
#endif
}

}  // namespace
