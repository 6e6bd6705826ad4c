// Some query rows at a time over some keys: the two products of attention, and the softmax between them.
#pragma once
#include <limits>

#include "attention_products.h"

namespace orca {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxQueryRows = 16;  // query tokens x heads that share K and V, taken together
constexpr int kChunkUnits = 16;    // 256 tokens whose scores are there at a time
constexpr int kChunk = kChunkUnits * kUnit;
constexpr int kUnitVectors = kUnit / kWidth;

template <typename To>
inline void load_query(const float* from, int64_t dim, float scale, To* q) {
  for (int64_t d = 0; d < dim; d += kWidth) store(q + d, load(from + d) * scale);
}

// Scores of R query rows with the 16 keys of a unit.
template <int R, typename Number>
inline void score_rows(const Number* k, int64_t dim, const Factor<Number> (*q)[kMaxHeadDim], float (*scores)[kChunk]) {
  Floats acc[R][kUnitVectors] = {};
  for (int64_t d = 0; d < dim; d += kTogether<Number>) add_products(acc, k + d * kUnit, q, d);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kUnitVectors; ++v) store(scores[r] + v * kWidth, acc[r][v]);
}

// out += p times V of so many keys, which lie in `units`: R rows, V vectors of dimensions from `first_dim` on.
template <int R, int V, typename Number>
inline void weigh_rows(const Number* const* units, int64_t dim, int64_t first_dim, int64_t keys, const Factor<Number> (*p)[kChunk],
                       float (*out)[kMaxHeadDim]) {
  constexpr int64_t kPack = kTogether<Number>;
  Floats acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(out[r] + first_dim + v * kWidth);
  for (int64_t key = 0; key < keys; key += kPack) {
    const Number* from = units[key / kUnit] + (key % kUnit * dim + first_dim * kPack);
    Number alone[V * kWidth * kPack];
    if (key + kPack > keys) {  // the other token's place may hold anything, not-a-number included
      for (int i = 0; i < V * kWidth * kPack; ++i) alone[i] = i % kPack == 0 ? from[i] : Number();
      from = alone;
    }
    add_products(acc, from, p, key);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out[r] + first_dim + v * kWidth, acc[r][v]);
}

template <int R, typename Number>
inline void weigh_all(const Number* const* units, int64_t dim, int64_t keys, const Factor<Number> (*p)[kChunk], float (*out)[kMaxHeadDim]) {
  constexpr int64_t kMost = ORCA_AVX512 ? 64 : kLanes;
  int64_t d = 0;
  for (; d + kMost <= dim; d += kMost) weigh_rows<R, kMost / kWidth>(units, dim, d, keys, p, out);
  for (; d < dim; d += kLanes) weigh_rows<R, kLanes / kWidth>(units, dim, d, keys, p, out);
}

inline float peak_of(const float* scores, int64_t n) {
  const Floats least = all(-std::numeric_limits<float>::infinity());
  Floats peak = least;
  for (int64_t i = 0; i < n; i += kWidth) peak = larger(first_lanes(n - i) ? load(scores + i) : least, peak);
  return combine_lanes(peak, [](float a, float b) { return std::max(a, b); });
}

// e^(score - peak) of one row's first n scores, and zeros up to a whole vector; returns their sum.
template <typename To>
inline float soften(const float* scores, int64_t n, float peak, To* p) {
  Floats total = {};
  for (int64_t i = 0; i < n; i += kWidth) {
    const Floats e = first_lanes(n - i) ? exp(load(scores + i) - peak) : Floats{};
    total += e;
    store(p + i, e);
  }
  return combine_lanes(total, [](float a, float b) { return a + b; });
}

}  // namespace orca
