// The two products of attention with K and V in bfloat16, and the softmax between them.
#pragma once
#include "attention_tile.h"

namespace orca {

inline void load_query(const float* from, int64_t dim, float scale, uint16_t* q) {
  for (int64_t d = 0; d < dim; ++d) q[d] = float_to_bf16(from[d] * scale);
}

#if ORCA_AVX512

inline uint32_t pair_at(const uint16_t* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return pair;
}

// acc + first numbers of 16 pairs times the pair's first + second ones times its second.
inline __m512 multiply_pairs(__m512 acc, const uint16_t* pairs, uint32_t by) {
  const __m512i x = _mm512_loadu_si512(pairs);
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)_mm512_set1_epi32(static_cast<int>(by)));
#else
  const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  acc = _mm512_fmadd_ps(low, _mm512_set1_ps(bf16_to_float(static_cast<uint16_t>(by))), acc);
  return _mm512_fmadd_ps(high, _mm512_set1_ps(bf16_to_float(static_cast<uint16_t>(by >> 16))), acc);
#endif
}

// Scores of R query rows with the 16 keys of a unit.
template <int R>
inline void score_rows(const uint16_t* k, int64_t dim, const uint16_t (*q)[kMaxHeadDim], float (*scores)[kChunk]) {
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim / 2; ++d, k += 2 * kUnit)
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r] = multiply_pairs(acc[r], k, pair_at(q[r] + 2 * d));
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(scores[r], acc[r]);
}

// Adds p of `pairs` pairs of tokens times V to out, D x 16 dimensions of R rows. `odd`: the last pair has one token.
template <int R, int D>
inline void weigh_rows(const uint16_t* const* units, int64_t dim, int64_t first_dim, int64_t pairs, bool odd,
                       const uint16_t (*p)[kChunk], float (*out)[kMaxHeadDim]) {
  __m512 acc[R][D];
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) acc[r][d] = _mm512_loadu_ps(out[r] + first_dim + d * kLanes);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const uint16_t* v = units[pair / 8] + (pair % 8 * dim + first_dim) * 2;
    alignas(64) uint16_t single[D * 2 * kLanes];
    if (odd && pair == pairs - 1) {  // the other token's place may hold anything, not-a-number included
      for (int i = 0; i < D * kLanes; ++i) single[2 * i] = v[2 * i], single[2 * i + 1] = 0;
      v = single;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) acc[r][d] = multiply_pairs(acc[r][d], v + d * 2 * kLanes, pair_at(p[r] + 2 * pair));
  }
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) _mm512_storeu_ps(out[r] + first_dim + d * kLanes, acc[r][d]);
}

// out += p times V of so many keys, which lie in `units`.
template <int R>
inline void weigh_all(const uint16_t* const* units, int64_t dim, int64_t keys, const uint16_t (*p)[kChunk], float (*out)[kMaxHeadDim]) {
  const int64_t pairs = (keys + 1) / 2;
  const bool odd = keys % 2 != 0;
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) weigh_rows<R, 4>(units, dim, d, pairs, odd, p, out);
  for (; d < dim; d += 16) weigh_rows<R, 1>(units, dim, d, pairs, odd, p, out);
}

// e^(score - peak) of one row's first n scores as bfloat16, n rounded up to 16; returns their sum.
inline float soften(float* scores, int64_t n, float peak, uint16_t* p) {
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 mask = n - i >= kLanes ? 0xffff : static_cast<__mmask16>((1 << (n - i)) - 1);
    const __m512 e = _mm512_maskz_mov_ps(mask, exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(peak))));
    total = _mm512_add_ps(total, e);
    // Rounded as float_to_bf16 does; numbers from 0 to 1 need no more care.
    __m512i bits = _mm512_castps_si512(e);
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1))));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
  return _mm512_reduce_add_ps(total);
}

#else

template <int R>
inline void score_rows(const uint16_t* k, int64_t dim, const uint16_t (*q)[kMaxHeadDim], float (*scores)[kChunk]) {
  for (int r = 0; r < R; ++r) {
    float acc[kUnit] = {};
    for (int64_t d = 0; d < dim / 2; ++d) {
      const float first = bf16_to_float(q[r][2 * d]), second = bf16_to_float(q[r][2 * d + 1]);
      for (int i = 0; i < kUnit; ++i)
        acc[i] += bf16_to_float(k[(d * kUnit + i) * 2]) * first + bf16_to_float(k[(d * kUnit + i) * 2 + 1]) * second;
    }
    std::copy(acc, acc + kUnit, scores[r]);
  }
}

template <int R>
inline void weigh_all(const uint16_t* const* units, int64_t dim, int64_t keys, const uint16_t (*p)[kChunk], float (*out)[kMaxHeadDim]) {
  for (int r = 0; r < R; ++r)
    for (int64_t pair = 0; pair < (keys + 1) / 2; ++pair) {
      const uint16_t* v = units[pair / 8] + pair % 8 * dim * 2;
      const float first = bf16_to_float(p[r][2 * pair]);
      for (int64_t d = 0; d < dim; ++d) out[r][d] += first * bf16_to_float(v[2 * d]);
      if (2 * pair + 1 == keys) continue;  // the other token's place may hold anything, not-a-number included
      const float second = bf16_to_float(p[r][2 * pair + 1]);
      for (int64_t d = 0; d < dim; ++d) out[r][d] += second * bf16_to_float(v[2 * d + 1]);
    }
}

inline float soften(float* scores, int64_t n, float peak, uint16_t* p) {
  float total = 0.0f;
  for (int64_t i = 0; i < (n + 1) / 2 * 2; ++i) {
    const float e = i < n ? std::exp(scores[i] - peak) : 0.0f;
    total += e;
    p[i] = float_to_bf16(e);
  }
  return total;
}

#endif

}  // namespace orca
