// The two products of attention with K and V in float32, and the softmax between them.
#pragma once
#include "attention_tile.h"

namespace orca {

inline void load_query(const float* from, int64_t dim, float scale, float* q) {
  for (int64_t d = 0; d < dim; ++d) q[d] = from[d] * scale;
}

// Scores of R query rows with the 16 keys of a unit.
template <int R>
inline void score_rows(const float* k, int64_t dim, const float (*q)[kMaxHeadDim], float (*scores)[kChunk]) {
  float acc[R][kUnit] = {};
  for (int64_t d = 0; d < dim; ++d, k += kUnit)
    for (int r = 0; r < R; ++r)
#pragma omp simd
      for (int i = 0; i < kUnit; ++i) acc[r][i] += q[r][d] * k[i];
  for (int r = 0; r < R; ++r) std::copy(acc[r], acc[r] + kUnit, scores[r]);
}

// out += p times V of so many keys, which lie in `units`.
template <int R>
inline void weigh_all(const float* const* units, int64_t dim, int64_t keys, const float (*p)[kChunk], float (*out)[kMaxHeadDim]) {
  for (int64_t first = 0; first < dim; first += kLanes) {
    float acc[R][kLanes];
    for (int r = 0; r < R; ++r) std::copy(out[r] + first, out[r] + first + kLanes, acc[r]);
    for (int64_t key = 0; key < keys; ++key) {
      const float* v = units[key / kUnit] + key % kUnit * dim + first;
      for (int r = 0; r < R; ++r)
#pragma omp simd
        for (int i = 0; i < kLanes; ++i) acc[r][i] += p[r][key] * v[i];
    }
    for (int r = 0; r < R; ++r) std::copy(acc[r], acc[r] + kLanes, out[r] + first);
  }
}

// e^(score - peak) of one row's first n scores, n rounded up to 16; returns their sum.
inline float soften(float* scores, int64_t n, float peak, float* p) {
#if ORCA_AVX512
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 mask = n - i >= kLanes ? 0xffff : static_cast<__mmask16>((1 << (n - i)) - 1);
    const __m512 e = _mm512_maskz_mov_ps(mask, exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(peak))));
    total = _mm512_add_ps(total, e);
    _mm512_storeu_ps(p + i, e);
  }
  return _mm512_reduce_add_ps(total);
#else
  float total = 0.0f;
  for (int64_t i = 0; i < n; ++i) total += p[i] = std::exp(scores[i] - peak);
  return total;
#endif
}

}  // namespace orca
