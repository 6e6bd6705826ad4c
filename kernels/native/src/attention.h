// Attention over paged K/V, for chunks of prompts and single tokens alike, all requests of an iteration in one call
// (PagedAttention; softmax in pieces as in FlashAttention).
#pragma once
#include <vector>

#include "attention_tile.h"

namespace orca {

constexpr int64_t kUnitsAhead = 4;  // K is fetched so many units before it is used: blocks lie anywhere in memory

// What one thread needs for one work item.
template <typename Number>
struct AttentionScratch {
  alignas(64) float scores[kMaxQueryRows][kChunk];
  alignas(64) float out[kMaxQueryRows][kMaxHeadDim];
  alignas(64) Factor<Number> q[kMaxQueryRows][kMaxHeadDim];
  alignas(64) Factor<Number> p[kMaxQueryRows][kChunk];
  float peak[kMaxQueryRows], sum[kMaxQueryRows];
};

// Where a request's unit of 16 tokens lies in the caches of one head.
inline int64_t offset_of(const Step& step, const Shape& shape, int64_t request, int64_t kv_head, int64_t position) {
  const int64_t block = step.block_tables[request * step.max_blocks + position / step.block_size];
  return unit_offset((block * step.block_size + position % step.block_size) / kUnit, kv_head, shape);
}

// Asks for one unit of one head, into the L2 cache.
template <typename Number>
inline void fetch(const Number* unit, int64_t dim) {
  for (int64_t i = 0; i < dim * kUnit; i += 64 / sizeof(Number)) __builtin_prefetch(unit + i, 0, 2);
}

// A piece of the work: some query tokens of one request over one K/V head.
struct AttentionItem {
  int32_t request, kv_head;
  int64_t first, last;
};

// Attention of all requests of an iteration: q and out [num_tokens, num_heads, head_dim]; strides in floats.
template <typename Number>
struct Attention {
  const Step& step;
  const Shape& shape;
  const Kv<Number>& kv;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  float scale;
};

// Query tokens [first, last) of a request, `heads` query heads from `head` on, all over the K/V head `kv_head`.
// `next`, if any, is the work that comes after: memory is asked for K and V before they are needed.
template <typename Number>
inline void attend_tile(const Attention<Number>& all, int64_t request, int64_t first, int64_t last, int64_t head, int64_t heads,
                        int64_t kv_head, AttentionScratch<Number>& s, bool cold, const AttentionItem* next) {
  const auto& [step, shape, kv, q, q_stride, out, out_stride, scale] = all;
  const int64_t dim = shape.head_dim;
  const int rows = static_cast<int>((last - first) * heads);
  // The last query token sees the whole context, the one before it one token less, and so on.
  const int64_t seen_by_first = step.context_lens[request] - (step.query_start[request + 1] - first) + 1;
  const int64_t num_keys = seen_by_first + (last - first) - 1;
  for (int r = 0; r < rows; ++r) {
    const float* from = q + (first + r / heads) * q_stride + (head + r % heads) * dim;
    load_query(from, dim, scale, s.q[r]);
    std::fill(s.out[r], s.out[r] + dim, 0.0f);
    s.peak[r] = -std::numeric_limits<float>::infinity();
    s.sum[r] = 0.0f;
  }
  for (int64_t start = 0; start < num_keys; start += kChunk) {
    const int64_t keys = std::min<int64_t>(kChunk, num_keys - start), units = (keys + kUnit - 1) / kUnit;
    const Number* v_units[kChunkUnits];
    for (int64_t u = 0; u < units; ++u) {
      const int64_t position = start + u * kUnit, ahead = position + kUnitsAhead * kUnit;
      const int64_t offset = offset_of(step, shape, request, kv_head, position);
      v_units[u] = kv.v + offset;
      if (cold) {
        fetch(v_units[u], dim);
        if (ahead < num_keys) fetch(kv.k + offset_of(step, shape, request, kv_head, ahead), dim);
      }
      in_pieces<6>(0, rows, [&](int64_t r, auto count) {
        score_rows<count>(kv.k + offset, dim, s.q + r, reinterpret_cast<float(*)[kChunk]>(s.scores[r] + u * kUnit));
      });
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t seen = std::min(keys, seen_by_first + r / heads - start);
      if (seen <= 0) {
        std::fill(s.p[r], s.p[r] + units * kUnit, Factor<Number>());
        continue;
      }
      const float peak = std::max(s.peak[r], peak_of(s.scores[r], seen));
      const float shrink = s.sum[r] > 0.0f ? std::exp(s.peak[r] - peak) : 0.0f;
      const float sum = soften(s.scores[r], seen, peak, s.p[r]);
      std::fill(s.p[r] + seen, s.p[r] + units * kUnit, Factor<Number>());
      if (start > 0)
        for (int64_t d = 0; d < dim; ++d) s.out[r][d] *= shrink;
      s.sum[r] = s.sum[r] * shrink + sum;
      s.peak[r] = peak;
    }
    if (next && start + kChunk >= num_keys)
      for (int64_t position = 0; position < std::min<int64_t>(kUnitsAhead * kUnit, step.context_lens[next->request]); position += kUnit)
        fetch(kv.k + offset_of(step, shape, next->request, next->kv_head, position), dim);
    in_pieces<6>(0, rows, [&](int64_t r, auto count) {
      weigh_all<count>(v_units, dim, keys, s.p + r, s.out + r);
    });
  }
  for (int r = 0; r < rows; ++r) {
    float* to = out + (first + r / heads) * out_stride + (head + r % heads) * dim;
    const float inverse = 1.0f / s.sum[r];
    for (int64_t d = 0; d < dim; ++d) to[d] = s.out[r][d] * inverse;
  }
}

// The work in pieces, in the order of tokens. Long queries are cut, so that one prompt keeps all threads busy.
inline std::vector<AttentionItem> attention_items(const Step& step, const Shape& shape) {
  constexpr int64_t kQueryTokens = 48;
  std::vector<AttentionItem> items;
  for (int32_t request = 0; request < step.num_requests; ++request) {
    const int64_t end = step.query_start[request + 1];
    for (int64_t first = step.query_start[request]; first < end; first += kQueryTokens)
      for (int32_t head = 0; head < shape.num_kv_heads; ++head)
        items.push_back({request, head, first, std::min(end, first + kQueryTokens)});
  }
  return items;
}

// One of the items.
template <typename Number>
inline void attend(const Attention<Number>& all, const std::vector<AttentionItem>& items, size_t index, AttentionScratch<Number>& scratch) {
  const int64_t group = all.shape.num_heads / all.shape.num_kv_heads;
  const int64_t heads_at_once = std::min<int64_t>(group, kMaxQueryRows);
  const int64_t tokens_at_once = std::max<int64_t>(1, 12 / heads_at_once);
  const AttentionItem& item = items[index];
  const AttentionItem* next = index + 1 < items.size() ? &items[index + 1] : nullptr;
  const int64_t first_head = item.kv_head * group, head_end = first_head + group;
  for (int64_t first = item.first; first < item.last; first += tokens_at_once)
    for (int64_t head = first_head; head < head_end; head += heads_at_once)
      attend_tile(all, item.request, first, std::min(item.last, first + tokens_at_once), head, std::min(heads_at_once, head_end - head),
                  item.kv_head, scratch, first == item.first && head == first_head, first + tokens_at_once >= item.last ? next : nullptr);
}

// All items: called by every thread of a team, which waits at the end.
template <typename Number>
inline void attend_in_team(const Attention<Number>& all, const std::vector<AttentionItem>& items) {
  AttentionScratch<Number> scratch;
  // All heads of a request one after the other, where that leaves enough pieces for all threads.
  const int64_t num_kv_heads = all.shape.num_kv_heads;
  const int at_once = items.size() >= 16 * static_cast<size_t>(num_kv_heads) ? static_cast<int>(num_kv_heads) : 1;
#pragma omp for schedule(dynamic, at_once)
  for (size_t i = 0; i < items.size(); ++i) attend(all, items, i, scratch);
}

}  // namespace orca
