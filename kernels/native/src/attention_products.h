// What K and V are multiplied by, and how, for both types of numbers that they have in memory.
#pragma once
#include "kv.h"

namespace orca {

// How many tokens (V) or dimensions (K) lie together as one lane of a vector.
template <typename Number>
constexpr int64_t kTogether = 1;
template <>
inline constexpr int64_t kTogether<uint16_t> = 2;

// What queries and the softmax are kept as: bfloat16 where the processor multiplies pairs of it.
#if ORCA_AVX512 && defined(__AVX512BF16__)
template <typename Number>
using Factor = Number;

inline void store(uint16_t* to, Floats x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  std::memcpy(to, &rounded, sizeof rounded);
}
#else
template <typename Number>
using Factor = float;
#endif

// acc[r] += the numbers of V vectors from `from` on, times row r's factor for them: by[r][at], and by[r][at + 1] for the
// second ones of pairs.
template <int R, int V, int N>
inline void add_products(Floats (&acc)[R][V], const float* from, const float (*by)[N], int64_t at) {
  Floats x[V];
  for (int v = 0; v < V; ++v) x[v] = load(from + v * kWidth);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const Floats factor = all(by[r][at]);
    for (int v = 0; v < V; ++v) acc[r][v] += x[v] * factor;
  }
}

template <int R, int V, int N>
inline void add_products(Floats (&acc)[R][V], const uint16_t* from, const Factor<uint16_t> (*by)[N], int64_t at) {
  Words pairs[V];
  for (int v = 0; v < V; ++v) pairs[v] = load<Words>(from + v * 2 * kWidth);
#if ORCA_AVX512 && defined(__AVX512BF16__)
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    int32_t pair;
    std::memcpy(&pair, by[r] + at, sizeof pair);
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)pairs[v], (__m512bh)all(pair));
  }
#else
#pragma GCC unroll 2
  for (int second = 0; second < 2; ++second) {
    Floats x[V];
    for (int v = 0; v < V; ++v) x[v] = (Floats)(second ? pairs[v] & 0xffff0000u : pairs[v] << 16);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats factor = all(by[r][at + second]);
      for (int v = 0; v < V; ++v) acc[r][v] += x[v] * factor;
    }
  }
#endif
}

}  // namespace orca
