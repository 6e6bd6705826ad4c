// Rows of activations as products take them: 8-bit numbers, one scale for each group of 64 columns.
#pragma once
#include <algorithm>
#include <limits>

#include "simd.h"

namespace orca {

constexpr int kRowGroup = 64;
constexpr int kGroup = 32;  // columns of weights that share a scale in the 4-bit form

inline int64_t padded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// x = scale * q, q in [-127, 127]; columns beyond a row's own are zeros.
struct Rows {
  int8_t* q;       // [rows, k]
  float* scale;    // [rows, k / 64]
  int32_t* start;  // [rows, k / 64]: -128 times the group's sum of q, where products with weights q + 128 begin
  float* sum;      // [rows, k / 32]: of x
  int64_t k;       // a multiple of 64
};

// A group with a number that is not finite: all products of its row come out as not-a-number.
inline void spoil_group(int8_t* q, float* scale, int32_t* start, float* sum) {
  std::fill(q, q + kRowGroup, static_cast<int8_t>(0));
  *start = 0;
  *scale = sum[0] = sum[1] = std::numeric_limits<float>::quiet_NaN();
}

#if ORCA_AVX512

inline void quantize_group(const float* x, int8_t* q, float* scale, int32_t* start, float* sum) {
  __m512 values[4], peaks = _mm512_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    values[i] = _mm512_loadu_ps(x + i * kLanes);
    peaks = _mm512_max_ps(peaks, _mm512_abs_ps(values[i]));
  }
  const float peak = _mm512_reduce_max_ps(peaks);
  constexpr int kNotFinite = 0x99;  // not-a-number, quiet or signalling, and both infinities
  if (_mm512_fpclass_ps_mask(values[0], kNotFinite) | _mm512_fpclass_ps_mask(values[1], kNotFinite) |
      _mm512_fpclass_ps_mask(values[2], kNotFinite) | _mm512_fpclass_ps_mask(values[3], kNotFinite)) {
    spoil_group(q, scale, start, sum);
    return;
  }
  const __m512 inverse = _mm512_set1_ps(peak > 0.0f ? 127.0f / peak : 0.0f);
  __m512i rounded[4];
  for (int i = 0; i < 4; ++i) {
    rounded[i] = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i * kLanes), _mm512_cvtsepi32_epi8(rounded[i]));
  }
  const int first = _mm512_reduce_add_epi32(_mm512_add_epi32(rounded[0], rounded[1]));
  const int second = _mm512_reduce_add_epi32(_mm512_add_epi32(rounded[2], rounded[3]));
  *scale = peak / 127.0f;
  *start = -128 * (first + second);
  sum[0] = *scale * static_cast<float>(first);
  sum[1] = *scale * static_cast<float>(second);
}

#else

inline void quantize_group(const float* x, int8_t* q, float* scale, int32_t* start, float* sum) {
  float peak = 0.0f;
  for (int i = 0; i < kRowGroup; ++i) {
    if (!std::isfinite(x[i])) {
      spoil_group(q, scale, start, sum);
      return;
    }
    peak = std::max(peak, std::fabs(x[i]));
  }
  const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
  *scale = peak / 127.0f;
  *start = 0;
  for (int half = 0; half < 2; ++half) {
    int total = 0;
    for (int i = half * kGroup; i < (half + 1) * kGroup; ++i) {
      const int value = static_cast<int>(std::nearbyint(x[i] * inverse));
      q[i] = static_cast<int8_t>(value);
      total += value;
    }
    *start -= 128 * total;
    sum[half] = *scale * static_cast<float>(total);
  }
}

#endif

// One group of one row, from up to 64 numbers.
inline void quantize_columns(const float* x, int64_t count, const Rows& rows, int64_t row, int64_t group) {
  alignas(64) float whole[kRowGroup];
  if (count < kRowGroup) {
    std::copy(x, x + count, whole);
    std::fill(whole + count, whole + kRowGroup, 0.0f);
    x = whole;
  }
  const int64_t at = row * (rows.k / kRowGroup) + group;
  quantize_group(x, rows.q + at * kRowGroup, rows.scale + at, rows.start + at, rows.sum + at * 2);
}

// A row of n numbers.
inline void quantize_row(const float* x, int64_t n, const Rows& rows, int64_t row) {
  for (int64_t group = 0; group < rows.k / kRowGroup; ++group)
    quantize_columns(x + group * kRowGroup, std::min<int64_t>(kRowGroup, n - group * kRowGroup), rows, row, group);
}

}  // namespace orca
