// What is done to one token's row between products: RMSNorm, rotary positions with the store of K and V, SiLU * mul.
#pragma once
#include "attention.h"

namespace orca {

struct Norm {
  const float* weight;  // null: none
  double eps;
};

// How far the heads of one token are turned, [dim / 2] each.
struct Angles {
  const float* cos;
  const float* sin;
};

// y = x / rms(x) * weight; y may be x.
inline void norm_row(const float* x, int64_t n, const Norm& norm, float* y) {
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(n) + static_cast<float>(norm.eps));
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor * norm.weight[i];
}

// Turns a head's pairs (i, i + dim / 2).
inline void rotate(float* x, int64_t dim, const Angles& angles) {
  const int64_t half = dim / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[half + i];
    x[i] = first * angles.cos[i] - second * angles.sin[i];
    x[half + i] = second * angles.cos[i] + first * angles.sin[i];
  }
}

// y = silu(gate) * up.
inline void silu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  int64_t i = 0;
#if ORCA_AVX512
  for (; i + kLanes <= n; i += kLanes) {
    const __m512 g = _mm512_loadu_ps(gate + i);
    const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), g));
    const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    _mm512_storeu_ps(y + i, _mm512_mul_ps(silu, _mm512_loadu_ps(up + i)));
  }
#endif
  for (; i < n; ++i) y[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

// What stands between the projection and attention for one token: its q, k and v heads lie one after the other in `qkv`;
// q and k are normalised head by head and turned in place, k and v stored.
inline void rotate_and_store(float* qkv, const Angles& angles, const Norm& q_norm, const Norm& k_norm, int64_t slot, const Shape& shape,
                             const KvLayer& kv) {
  const int64_t dim = shape.head_dim, num_heads = shape.num_heads, num_kv_heads = shape.num_kv_heads;
  for (int64_t head = 0; head < num_heads + num_kv_heads; ++head) {
    float* x = qkv + head * dim;
    const Norm& norm = head < num_heads ? q_norm : k_norm;
    if (norm.weight) norm_row(x, dim, norm, x);
    rotate(x, dim, angles);
  }
  const float* k = qkv + num_heads * dim;
  for (int64_t head = 0; head < num_kv_heads; ++head) store_kv(k + head * dim, k + (num_kv_heads + head) * dim, slot, head, shape, kv);
}

}  // namespace orca
