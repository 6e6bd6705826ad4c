// What is done to one token's row between products: RMSNorm, rotary positions with the store of K and V, SiLU * mul.
#pragma once
#include "kv.h"

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
  for (; i + kWidth <= n; i += kWidth) {
    const Floats g = load(gate + i);
    store(y + i, g / (exp(-g) + 1.0f) * load(up + i));
  }
  for (; i < n; ++i) y[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

// What stands between the projection and attention for one token: q and k, heads one after the other, are normalised head by
// head and turned in place; k and v are stored.
template <typename Number>
inline void rotate_and_store(float* q, float* k, const float* v, const Angles& angles, const Norm& q_norm, const Norm& k_norm, int64_t slot,
                             const Shape& shape, const Kv<Number>& kv) {
  const int64_t dim = shape.head_dim;
  const auto turn = [&](float* heads, int64_t num_heads, const Norm& norm) {
    for (float* head = heads; head < heads + num_heads * dim; head += dim) {
      if (norm.weight) norm_row(head, dim, norm, head);
      rotate(head, dim, angles);
    }
  };
  turn(q, shape.num_heads, q_norm);
  turn(k, shape.num_kv_heads, k_norm);
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) store_kv(k + head * dim, v + head * dim, slot, head, shape, kv);
}

}  // namespace orca
