// From float32 weights to the packed forms of linear.h, and back.
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

// The columns of one row that a group has; zeros beyond the matrix.
template <int kColumns>
inline const float* columns_of(const float* w, const Packed& packed, int64_t row, int64_t group, float (&copy)[kColumns]) {
  const int64_t first = group * kColumns, count = row < packed.n ? std::min<int64_t>(kColumns, packed.k - first) : 0;
  if (count == kColumns) return w + row * packed.k + first;
  std::fill(copy, copy + kColumns, 0.0f);
  if (count > 0) std::copy(w + row * packed.k + first, w + row * packed.k + first + count, copy);
  return copy;
}

// One group of a row in 4 bits: w = scale * q + offset.
struct FourBits {
  float scale, offset, error;  // the largest error, relative to the largest weight
  uint8_t q[kGroup];

  FourBits(const float* w, float peak, float exact_scale, float exact_offset)
      : scale(round_to_half(exact_scale)), offset(round_to_half(exact_offset)), error(0.0f) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < kGroup; ++i) {
      const float value = std::min(15.0f, std::max(0.0f, std::nearbyint((w[i] - offset) * inverse)));
      const float off = std::fabs(scale * value + offset - w[i]);
      const float relative = !std::isfinite(off) ? std::numeric_limits<float>::infinity() : off > 0.0f ? off / peak : 0.0f;
      error = std::max(error, relative);
      q[i] = std::isfinite(value) ? static_cast<uint8_t>(value) : 0;
    }
  }
};

// Packs one row as groups: each from its smallest weight to its largest (Q4_1), or in eighths of the largest (Q4_0),
// whichever is nearer, so that weights that a file has so are met exactly. Returns the largest error, relative to the
// largest weight of its group.
inline float pack_groups(const float* weights, const Packed& packed, int64_t row, uint8_t* groups) {
  const int64_t lane = row % kLanes;
  uint8_t* to = groups + row / kLanes * packed.groups_tile_bytes();
  float worst = 0.0f, zeros[kGroup];
  for (int64_t g = 0; g < packed.padded_k() / kGroup; ++g, to += kGroupBytes) {
    const float* w = columns_of(weights, packed, row, g, zeros);
    const auto [low, high] = std::minmax_element(w, w + kGroup);
    const float peak = std::max(std::fabs(*low), std::fabs(*high)), eighth = peak / 8.0f;
    const FourBits range(w, peak, (*high - *low) / 15.0f, *low), eighths(w, peak, eighth, (-*low >= *high ? -8.0f : -7.0f) * eighth);
    const FourBits& best = eighths.error < range.error ? eighths : range;
    worst = std::max(worst, best.error);
    for (int i = 0; i < 16; ++i) to[i / 4 * 64 + 4 * lane + i % 4] = static_cast<uint8_t>(best.q[i] | best.q[i + 16] << 4);
    const uint16_t s = float_to_half(best.scale), o = float_to_half(best.offset);
    std::memcpy(to + 256 + 2 * lane, &s, sizeof s);
    std::memcpy(to + 288 + 2 * lane, &o, sizeof o);
  }
  return worst;
}

// Packs one row as a channel.
inline void pack_channel(const float* weights, const Packed& packed, int64_t row, uint8_t* channels, float* scales) {
  const int64_t lane = row % kLanes;
  uint8_t* to = channels + row / kLanes * packed.channels_tile_bytes() + 4 * lane;
  float peak = 0.0f, zeros[4];
  if (row < packed.n)
    for (int64_t i = 0; i < packed.k; ++i) peak = std::max(peak, std::fabs(weights[row * packed.k + i]));
  const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
  scales[row] = peak / 127.0f;
  for (int64_t c = 0; c < packed.padded_k() / 4; ++c, to += 64) {
    const float* w = columns_of(weights, packed, row, c, zeros);
    for (int j = 0; j < 4; ++j) {
      const float q = std::nearbyint(w[j] * inverse);
      to[j] = static_cast<uint8_t>(std::isfinite(q) ? 128 + static_cast<int>(q) : 128);
    }
  }
}

// One row as float32 [k].
inline void unpack_row(const Packed& packed, int64_t row, float* out) {
  const int64_t lane = row % kLanes;
  if (packed.groups) {
    const uint8_t* tile = packed.groups + row / kLanes * packed.groups_tile_bytes();
    for (int64_t i = 0; i < packed.k; ++i) {
      const uint8_t* group = tile + i / kGroup * kGroupBytes;
      const uint8_t byte = group[i % 16 / 4 * 64 + 4 * lane + i % 4];
      const int q = i % kGroup < 16 ? byte & 15 : byte >> 4;
      out[i] = half_to_float(group + 256 + 2 * lane) * static_cast<float>(q) + half_to_float(group + 288 + 2 * lane);
    }
  } else {
    const uint8_t* tile = packed.channels + row / kLanes * packed.channels_tile_bytes();
    for (int64_t i = 0; i < packed.k; ++i)
      out[i] = packed.scales[row] * static_cast<float>(tile[i / 4 * 64 + 4 * lane + i % 4] - 128);
  }
}

}  // namespace orca
