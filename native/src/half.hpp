// Scalar conversions of 16-bit floats, the same on every CPU; round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float bf16_float(uint16_t half) {
    return bits_float(static_cast<uint32_t>(half) << 16);
}

inline uint16_t float_bf16(float value) {
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<uint16_t>((bits >> 16) | 0x40u);  // a NaN stays one
    }
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    // Scaling by a power of two handles subnormals without a branch.
    const float scaled = bits_float(magnitude << 13) * bits_float(0x77800000u);  // 2^112
    return bits_float(sign | float_bits(scaled));
}

inline uint16_t float_f16(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<uint16_t>(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) {
        return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    }
    if (magnitude < 0x38800000u) {
        // Subnormal half: adding 0.5 leaves the rounded 24-bit fraction in the low bits.
        const float shifted = bits_float(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | (rounded >> 13));
}

}  // namespace
