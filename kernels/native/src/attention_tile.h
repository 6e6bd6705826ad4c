// How much of attention is done at a time, and the largest of some scores.
#pragma once
#include <algorithm>
#include <limits>

#include "kv.h"

namespace orca {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxQueryRows = 16;  // query tokens x heads that share K and V, taken together
constexpr int kChunkUnits = 16;    // 256 tokens whose scores are there at a time
constexpr int kChunk = kChunkUnits * kUnit;

inline float peak_of(const float* scores, int64_t n) {
#if ORCA_AVX512
  __m512 peak = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 mask = n - i >= kLanes ? 0xffff : static_cast<__mmask16>((1 << (n - i)) - 1);
    peak = _mm512_mask_max_ps(peak, mask, peak, _mm512_loadu_ps(scores + i));
  }
  return _mm512_reduce_max_ps(peak);
#else
  return *std::max_element(scores, scores + n);
#endif
}

}  // namespace orca
