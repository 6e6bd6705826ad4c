// The library tries itself, through the functions that others call: products of every size and form against plain
// arithmetic on the same quantised numbers, and attention.
#include <vector>

#include "attention.h"
#include "pack.h"

using namespace orca;

// What a test of the check has it do.
#if !defined(ORCA_MISTAKE)
#define ORCA_MISTAKE
#endif

extern "C" {
void orca_linear(const Packed*, const float* x, int64_t num_rows, const float* norm_weight, double eps, float* y, uint8_t* workspace,
                 int num_threads);
int64_t orca_linear_workspace_bytes(int64_t num_rows, int64_t k);
void orca_attention_bf16(const Step*, const Shape*, const Kv<uint16_t>*, const float* q, int64_t q_stride, float* out, float scale,
                         int num_threads);
void orca_attention_f32(const Step*, const Shape*, const Kv<float>*, const float* q, int64_t q_stride, float* out, float scale,
                        int num_threads);
}

namespace {

struct Random {
  uint32_t state = 1;
  float operator()() { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f; }
};

bool products_are_right() {
  constexpr int64_t n = 72, k = 160, most = 41;
  const Packed shape{nullptr, nullptr, nullptr, n, k};
  std::vector<uint8_t> groups(shape.num_tiles() * shape.groups_tile_bytes()), channels(shape.num_tiles() * shape.channels_tile_bytes());
  std::vector<float> weights(n * k), scales(shape.num_tiles() * kLanes), x(most * k);
  Random random;
  for (float& value : weights) value = random();
  for (float& value : x) value = random();
  const Packed all{groups.data(), channels.data(), scales.data(), n, k};
  for (int64_t row = 0; row < shape.num_tiles() * kLanes; ++row) {
    pack_groups(weights.data(), shape, row, groups.data());
    pack_channel(weights.data(), shape, row, channels.data(), scales.data());
  }
  const int64_t padded_k = shape.padded_k(), rows_there = padded(most, kRowsAtOnce);
  std::vector<int8_t> q(rows_there * padded_k);
  std::vector<float> scale(rows_there * padded_k / kRowGroup), sum(rows_there * padded_k / kGroup), row_weights(k), y(most * n);
  std::vector<int32_t> start(scale.size());
  const Rows rows{q.data(), scale.data(), start.data(), sum.data(), padded_k};
  for (int64_t row = 0; row < most; ++row) quantize_row(x.data() + row * k, k, rows, row);
  std::vector<uint8_t> memory(orca_linear_workspace_bytes(most, k) + 64);
  uint8_t* workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  for (const Packed& w : {all, Packed{nullptr, channels.data(), scales.data(), n, k}})
    for (const int64_t num_rows : {int64_t{1}, int64_t{5}, int64_t{8}, int64_t{13}, int64_t{20}, most}) {
      orca_linear(&w, x.data(), num_rows, nullptr, 0.0, y.data(), workspace, 1);
      const Packed used{are_few(num_rows) ? w.groups : nullptr, w.channels, w.scales, n, k};
      for (int64_t column = 0; column < n; ++column) {
        unpack_row(used, column, row_weights.data());
        for (int64_t row = 0; row < num_rows; ++row) {
          double expected = 0.0;
          for (int64_t i = 0; i < k; ++i)
            expected += static_cast<double>(row_weights[i]) * scale[(row * padded_k + i) / kRowGroup] * q[row * padded_k + i];
          if (!(std::fabs(y[row * n + column] - expected) < 1e-3)) return false;
        }
      }
    }
  return true;
}

// The last of 19 tokens, over two blocks in the wrong order.
template <typename Number, typename Attention>
bool attention_is_right(Attention attention) {
  constexpr int64_t tokens = 19, dim = 48, heads = 2;
  const Shape shape{heads, 1, dim};
  const int32_t query_start[] = {0, 1}, context_lens[] = {tokens}, blocks[] = {1, 0};
  const Step step{1, 1, nullptr, nullptr, query_start, context_lens, blocks, 2, kUnit};
  std::vector<float> k(tokens * dim), v(tokens * dim), q(heads * dim), out(heads * dim);
  std::vector<Number> keys(2 * kUnit * dim), values(2 * kUnit * dim);
  const Kv<Number> kv{keys.data(), values.data()};
  Random random;
  for (auto* numbers : {&k, &v, &q})
    for (float& value : *numbers) value = random();
  for (int64_t t = 0; t < tokens; ++t) store_kv(&k[t * dim], &v[t * dim], blocks[t / kUnit] * kUnit + t % kUnit, 0, shape, kv);
  attention(&step, &shape, &kv, q.data(), heads * dim, out.data(), 0.3f, 1);
  for (int64_t head = 0; head < heads; ++head) {
    std::vector<double> expected(dim);
    double total = 0.0;
    for (int64_t t = 0; t < tokens; ++t) {
      double score = 0.0;
      for (int64_t d = 0; d < dim; ++d) score += static_cast<double>(q[head * dim + d]) * k[t * dim + d];
      const double weight = std::exp(0.3 * score);
      total += weight;
      for (int64_t d = 0; d < dim; ++d) expected[d] += weight * v[t * dim + d];
    }
    for (int64_t d = 0; d < dim; ++d)
      if (!(std::fabs(out[head * dim + d] - expected[d] / total) < 0.02)) return false;  // bfloat16
  }
  return true;
}

}  // namespace

extern "C" int orca_check() {
  ORCA_MISTAKE;
  const bool is_right =
      products_are_right() && attention_is_right<uint16_t>(orca_attention_bf16) && attention_is_right<float>(orca_attention_f32);
  return is_right ? 0 : 1;
}
