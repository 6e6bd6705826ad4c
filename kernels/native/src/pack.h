// From float32 weights to the packed form of linear.h.
#pragma once
#include "linear.h"

namespace orca {

inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
  uint32_t mantissa = bits & 0x7fffff;
  if (exponent >= 31) return static_cast<uint16_t>(sign | 0x7c00);
  if (exponent <= 0) {
    if (exponent < -10) return static_cast<uint16_t>(sign);
    mantissa |= 0x800000;
    const int shift = 14 - exponent;
    const uint32_t half = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
    return static_cast<uint16_t>(sign | (half + (rest > middle || (rest == middle && (half & 1)))));
  }
  const uint32_t half = static_cast<uint32_t>(exponent) << 10 | mantissa >> 13, rest = mantissa & 0x1fff;
  return static_cast<uint16_t>(sign | (half + (rest > 0x1000 || (rest == 0x1000 && (half & 1)))));
#endif
}

inline float round_to_half(float x) {
  const uint16_t half = float_to_half(x);
  uint8_t bytes[2];
  std::memcpy(bytes, &half, sizeof half);
  return half_to_float(bytes);
}

// Packs one row's group of 32 weights into its lane; returns the largest error.
// 4 bits: from the smallest to the largest (Q4_1). 8 bits: symmetric (Q8_0). Weights that come out of a file so
// quantised are met exactly.
inline float pack_group(const float* w, int64_t bits, int64_t lane, uint8_t* group) {
  float scale, offset;
  if (bits == 4) {
    const auto [low, high] = std::minmax_element(w, w + kGroup);
    scale = round_to_half((*high - *low) / 15.0f);
    offset = round_to_half(*low);
  } else {
    float peak = 0.0f;
    for (int i = 0; i < kGroup; ++i) peak = std::max(peak, std::fabs(w[i]));
    scale = round_to_half(peak / 127.0f);
    offset = -128.0f * scale;
  }
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f, top = bits == 4 ? 15.0f : 255.0f;
  float error = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float q = std::min(top, std::max(0.0f, std::nearbyint((w[i] - offset) * inverse)));
    error = std::max(error, std::fabs(scale * q + offset - w[i]));
    const int place = bits == 4 ? i % 16 : i;
    uint8_t& byte = group[place / 4 * 64 + 4 * lane + place % 4];
    byte = static_cast<uint8_t>(bits == 8 || i < 16 ? static_cast<int>(q) : byte | static_cast<int>(q) << 4);
  }
  uint8_t* constants = group + bits * 64;
  const uint16_t s = float_to_half(scale), o = float_to_half(offset);
  std::memcpy(constants + 2 * lane, &s, sizeof s);
  std::memcpy(constants + 32 + 2 * lane, &o, sizeof o);
  return error;
}

}  // namespace orca
