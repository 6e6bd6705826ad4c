// K and V in blocks of memory (PagedAttention), as bfloat16 or float32, and what an iteration does to them.
//
// Within a block they lie in units of 16 tokens, for each head so that one vector is what is taken together, of 16 tokens
// (K) or of 16 dimensions (V); bfloat16 in pairs, which is what the processor's product takes:
//   bfloat16: K [units, kv_heads, head_dim / 2, 16 tokens, 2]     V [units, kv_heads, 8, head_dim, 2 tokens]
//   float32:  K [units, kv_heads, head_dim, 16 tokens]            V [units, kv_heads, 16 tokens, head_dim]
#pragma once
#include "simd.h"

namespace orca {

constexpr int kUnit = 16;  // tokens

template <typename Number>  // uint16_t: bfloat16
struct Kv {
  Number* k;
  Number* v;
};
using KvLayer = Kv<uint16_t>;

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim;
};

struct Step {
  int64_t num_tokens, num_requests;
  const int64_t* positions;      // [num_tokens]
  const int64_t* slots;          // [num_tokens]
  const int32_t* query_start;    // [num_requests + 1]
  const int32_t* context_lens;   // [num_requests]
  const int32_t* block_tables;   // [num_requests, max_blocks]
  int64_t max_blocks, block_size;  // block_size is a multiple of 16
};

inline int64_t unit_offset(int64_t unit, int64_t head, const Shape& shape) {
  return (unit * shape.num_kv_heads + head) * shape.head_dim * kUnit;
}

inline void store_kv(const float* k, const float* v, int64_t slot, int64_t head, const Shape& shape, const KvLayer& kv) {
  const int64_t dim = shape.head_dim, lane = slot % kUnit;
  uint16_t* to_k = kv.k + unit_offset(slot / kUnit, head, shape) + 2 * lane;
  uint16_t* to_v = kv.v + unit_offset(slot / kUnit, head, shape) + lane / 2 * dim * 2 + lane % 2;
  for (int64_t d = 0; d < dim; d += 2) {
    to_k[d * kUnit] = float_to_bf16(k[d]);
    to_k[d * kUnit + 1] = float_to_bf16(k[d + 1]);
  }
  for (int64_t d = 0; d < dim; ++d) to_v[2 * d] = float_to_bf16(v[d]);
}

inline void store_kv(const float* k, const float* v, int64_t slot, int64_t head, const Shape& shape, const Kv<float>& kv) {
  const int64_t dim = shape.head_dim, lane = slot % kUnit, offset = unit_offset(slot / kUnit, head, shape);
  for (int64_t d = 0; d < dim; ++d) kv.k[offset + d * kUnit + lane] = k[d];
  std::memcpy(kv.v + offset + lane * dim, v, dim * sizeof(float));
}

}  // namespace orca
