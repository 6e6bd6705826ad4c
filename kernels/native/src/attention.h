// Attention over paged K/V in bfloat16, for chunks of prompts and single tokens alike, all requests of an iteration in
// one call (PagedAttention; softmax in pieces as in FlashAttention).
//
// The caches lie in units of 16 tokens, for each head so that one vector of 64 bytes is two numbers of 16 tokens (K) or
// of 16 dimensions (V), which is what the processor's bfloat16 product takes:
//   K [units, kv_heads, head_dim / 2, 16 tokens, 2]     V [units, kv_heads, 8, head_dim, 2 tokens]
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace orca {

constexpr int kUnit = 16;          // tokens
constexpr int kMaxHeadDim = 256;
constexpr int kMaxQueryRows = 16;  // query tokens x heads that share K and V, taken together
constexpr int kChunkUnits = 16;    // 256 tokens whose scores are there at a time
constexpr int kChunk = kChunkUnits * kUnit;

struct KvLayer {
  uint16_t* k;
  uint16_t* v;
};

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

inline uint32_t bf16_pair(float first, float second) {
  return static_cast<uint32_t>(float_to_bf16(first)) | static_cast<uint32_t>(float_to_bf16(second)) << 16;
}

// What one thread needs for one work item.
struct AttentionScratch {
  alignas(64) float scores[kMaxQueryRows][kChunk];
  alignas(64) float out[kMaxQueryRows][kMaxHeadDim];
  alignas(64) uint32_t q[kMaxQueryRows][kMaxHeadDim / 2];
  alignas(64) uint32_t p[kMaxQueryRows][kChunk / 2];
  float peak[kMaxQueryRows], sum[kMaxQueryRows];
};

#if ORCA_AVX512

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

template <int R>
inline void score_rows(const uint16_t* k, int64_t dim, const uint32_t (*q)[kMaxHeadDim / 2], float (*scores)[kChunk]) {
  __m512 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim / 2; ++d, k += 2 * kUnit)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r] = multiply_pairs(acc[r], k, q[r][d]);
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(scores[r], acc[r]);
}

// Adds p of `pairs` pairs of tokens times V to out, 64 dimensions of R rows at a time. `odd`: the last pair has one token.
template <int R, int D>
inline void weigh_rows(const uint16_t* const* units, int64_t dim, int64_t first_dim, int64_t pairs, bool odd,
                       const uint32_t (*p)[kChunk / 2], float (*out)[kMaxHeadDim]) {
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
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) acc[r][d] = multiply_pairs(acc[r][d], v + d * 2 * kLanes, p[r][pair]);
  }
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) _mm512_storeu_ps(out[r] + first_dim + d * kLanes, acc[r][d]);
}

template <int R>
inline void weigh_all(const uint16_t* const* units, int64_t dim, int64_t pairs, bool odd, const uint32_t (*p)[kChunk / 2],
                      float (*out)[kMaxHeadDim]) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) weigh_rows<R, 4>(units, dim, d, pairs, odd, p, out);
  for (; d < dim; d += 16) weigh_rows<R, 1>(units, dim, d, pairs, odd, p, out);
}

// e^(score - peak) of one row's first n scores as pairs of bfloat16, n rounded up to 32; returns their sum.
inline float soften(float* scores, int64_t n, float peak, uint32_t* p) {
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 mask = n - i >= kLanes ? 0xffff : static_cast<__mmask16>((1 << (n - i)) - 1);
    const __m512 e = _mm512_maskz_mov_ps(mask, exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(peak))));
    total = _mm512_add_ps(total, e);
    // Rounded as float_to_bf16 does; numbers from 0 to 1 need no more care.
    __m512i bits = _mm512_castps_si512(e);
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1))));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(p) + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
  return _mm512_reduce_add_ps(total);
}

inline float peak_of(const float* scores, int64_t n) {
  __m512 peak = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 mask = n - i >= kLanes ? 0xffff : static_cast<__mmask16>((1 << (n - i)) - 1);
    peak = _mm512_mask_max_ps(peak, mask, peak, _mm512_loadu_ps(scores + i));
  }
  return _mm512_reduce_max_ps(peak);
}

#else

template <int R>
inline void score_rows(const uint16_t* k, int64_t dim, const uint32_t (*q)[kMaxHeadDim / 2], float (*scores)[kChunk]) {
  for (int r = 0; r < R; ++r) {
    float acc[kUnit] = {};
    for (int64_t d = 0; d < dim / 2; ++d) {
      const float first = bf16_to_float(static_cast<uint16_t>(q[r][d])), second = bf16_to_float(static_cast<uint16_t>(q[r][d] >> 16));
      for (int i = 0; i < kUnit; ++i)
        acc[i] += bf16_to_float(k[(d * kUnit + i) * 2]) * first + bf16_to_float(k[(d * kUnit + i) * 2 + 1]) * second;
    }
    std::copy(acc, acc + kUnit, scores[r]);
  }
}

template <int R>
inline void weigh_all(const uint16_t* const* units, int64_t dim, int64_t pairs, bool odd, const uint32_t (*p)[kChunk / 2],
                      float (*out)[kMaxHeadDim]) {
  for (int r = 0; r < R; ++r)
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const uint16_t* v = units[pair / 8] + pair % 8 * dim * 2;
      const float first = bf16_to_float(static_cast<uint16_t>(p[r][pair]));
      for (int64_t d = 0; d < dim; ++d) out[r][d] += first * bf16_to_float(v[2 * d]);
      if (odd && pair == pairs - 1) continue;  // the other token's place may hold anything, not-a-number included
      const float second = bf16_to_float(static_cast<uint16_t>(p[r][pair] >> 16));
      for (int64_t d = 0; d < dim; ++d) out[r][d] += second * bf16_to_float(v[2 * d + 1]);
    }
}

inline float soften(float* scores, int64_t n, float peak, uint32_t* p) {
  float total = 0.0f;
  uint16_t* to = reinterpret_cast<uint16_t*>(p);
  for (int64_t i = 0; i < (n + 1) / 2 * 2; ++i) {
    const float e = i < n ? std::exp(scores[i] - peak) : 0.0f;
    total += e;
    to[i] = float_to_bf16(e);
  }
  return total;
}

inline float peak_of(const float* scores, int64_t n) { return *std::max_element(scores, scores + n); }

#endif

template <typename Call>
inline void in_fours(int rows, Call call) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) call(r, std::integral_constant<int, 4>());
  switch (rows - r) {
    case 3: call(r, std::integral_constant<int, 3>()); break;
    case 2: call(r, std::integral_constant<int, 2>()); break;
    case 1: call(r, std::integral_constant<int, 1>()); break;
  }
}

// Query tokens [first, last) of a request, `heads` query heads from `head` on, all over the K/V head `kv_head`.
// q and out [num_tokens, num_heads, head_dim]; strides in floats.
inline void attend_tile(const Step& step, const Shape& shape, const KvLayer& kv, int64_t request, int64_t first, int64_t last,
                        int64_t head, int64_t heads, int64_t kv_head, const float* q, int64_t q_stride, float* out,
                        int64_t out_stride, float scale, AttentionScratch& s) {
  const int64_t dim = shape.head_dim;
  const int rows = static_cast<int>((last - first) * heads);
  // The last query token sees the whole context, the one before it one token less, and so on.
  const int64_t seen_by_first = step.context_lens[request] - (step.query_start[request + 1] - first) + 1;
  const int64_t num_keys = seen_by_first + (last - first) - 1;
  for (int r = 0; r < rows; ++r) {
    const float* from = q + (first + r / heads) * q_stride + (head + r % heads) * dim;
    for (int64_t d = 0; d < dim; d += 2) s.q[r][d / 2] = bf16_pair(from[d] * scale, from[d + 1] * scale);
    std::fill(s.out[r], s.out[r] + dim, 0.0f);
    s.peak[r] = -std::numeric_limits<float>::infinity();
    s.sum[r] = 0.0f;
  }
  const int32_t* table = step.block_tables + request * step.max_blocks;
  for (int64_t start = 0; start < num_keys; start += kChunk) {
    const int64_t keys = std::min<int64_t>(kChunk, num_keys - start), units = (keys + kUnit - 1) / kUnit;
    const uint16_t* v_units[kChunkUnits];
    for (int64_t u = 0; u < units; ++u) {
      const int64_t position = start + u * kUnit;
      const int64_t slot = table[position / step.block_size] * step.block_size + position % step.block_size;
      const int64_t offset = unit_offset(slot / kUnit, kv_head, shape);
      v_units[u] = kv.v + offset;
      in_fours(rows, [&](int r, auto count) {
        score_rows<count>(kv.k + offset, dim, s.q + r, reinterpret_cast<float(*)[kChunk]>(s.scores[r] + u * kUnit));
      });
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t seen = std::min(keys, seen_by_first + r / heads - start);
      if (seen <= 0) {
        std::fill(s.p[r], s.p[r] + units * kUnit / 2, 0u);
        continue;
      }
      const float peak = std::max(s.peak[r], peak_of(s.scores[r], seen));
      const float shrink = s.sum[r] > 0.0f ? std::exp(s.peak[r] - peak) : 0.0f;
      const float sum = soften(s.scores[r], seen, peak, s.p[r]);
      uint16_t* p = reinterpret_cast<uint16_t*>(s.p[r]);
      std::fill(p + seen, p + units * kUnit, static_cast<uint16_t>(0));
      if (start > 0)
        for (int64_t d = 0; d < dim; ++d) s.out[r][d] *= shrink;
      s.sum[r] = s.sum[r] * shrink + sum;
      s.peak[r] = peak;
    }
    in_fours(rows, [&](int r, auto count) {
      weigh_all<count>(v_units, dim, (keys + 1) / 2, keys % 2 != 0, s.p + r, s.out + r);
    });
  }
  for (int r = 0; r < rows; ++r) {
    float* to = out + (first + r / heads) * out_stride + (head + r % heads) * dim;
    const float inverse = 1.0f / s.sum[r];
    for (int64_t d = 0; d < dim; ++d) to[d] = s.out[r][d] * inverse;
  }
}

// A piece of the work: some query tokens of one request over one K/V head.
struct AttentionItem {
  int32_t request, kv_head;
  int64_t first, last;
};

// Long queries are cut, so that one prompt keeps all threads busy.
inline void attention_items(const Step& step, const Shape& shape, std::vector<AttentionItem>& items) {
  constexpr int64_t kQueryTokens = 48;
  items.clear();
  for (int32_t request = 0; request < step.num_requests; ++request) {
    const int64_t end = step.query_start[request + 1];
    for (int64_t first = step.query_start[request]; first < end; first += kQueryTokens)
      for (int32_t head = 0; head < shape.num_kv_heads; ++head)
        items.push_back({request, head, first, std::min(end, first + kQueryTokens)});
  }
}

// All requests: called by every thread of a team, which waits at the end.
inline void attention_in_team(const Step& step, const Shape& shape, const std::vector<AttentionItem>& items, const KvLayer& kv,
                              const float* q, int64_t q_stride, float* out, int64_t out_stride, float scale) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t heads_at_once = std::min<int64_t>(group, kMaxQueryRows);
  const int64_t tokens_at_once = std::max<int64_t>(1, 12 / heads_at_once);
  AttentionScratch scratch;
#pragma omp for schedule(dynamic, 1)
  for (size_t i = 0; i < items.size(); ++i) {
    const AttentionItem& item = items[i];
    const int64_t head_end = (item.kv_head + 1) * group;
    for (int64_t first = item.first; first < item.last; first += tokens_at_once)
      for (int64_t head = item.kv_head * group; head < head_end; head += heads_at_once)
        attend_tile(step, shape, kv, item.request, first, std::min(item.last, first + tokens_at_once), head,
                    std::min(heads_at_once, head_end - head), item.kv_head, q, q_stride, out, out_stride, scale, scratch);
  }
}

}  // namespace orca
