// The library tries itself: products of every size and form against plain arithmetic on the same quantised numbers.
#include <vector>

#include "pack.h"

using namespace orca;

// What a test of the check has it do.
#if !defined(ORCA_MISTAKE)
#define ORCA_MISTAKE
#endif

extern "C" int orca_check() {
  ORCA_MISTAKE;
  constexpr int64_t n = 72, k = 160, most = 41;
  const Packed shape{nullptr, nullptr, nullptr, n, k};
  std::vector<uint8_t> groups(shape.num_tiles() * shape.groups_tile_bytes()), channels(shape.num_tiles() * shape.channels_tile_bytes());
  std::vector<float> weights(n * k), scales(shape.num_tiles() * kLanes), x(most * k);
  uint32_t state = 1;
  const auto random = [&] { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f; };
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
  for (const Packed& w : {all, Packed{nullptr, channels.data(), scales.data(), n, k}})
    for (const int64_t num_rows : {int64_t{1}, int64_t{5}, kFewRows, int64_t{20}, most}) {
      [[maybe_unused]] const AmxTiles tiles;
      linear_in_team(w, rows, num_rows, {y.data(), n});
      const Packed used{num_rows <= kFewRows ? w.groups : nullptr, w.channels, w.scales, n, k};
      for (int64_t column = 0; column < n; ++column) {
        unpack_row(used, column, row_weights.data());
        for (int64_t row = 0; row < num_rows; ++row) {
          double expected = 0.0;
          for (int64_t i = 0; i < k; ++i)
            expected += static_cast<double>(row_weights[i]) * scale[(row * padded_k + i) / kRowGroup] * q[row * padded_k + i];
          if (!(std::fabs(y[row * n + column] - expected) < 1e-3)) return 1;
        }
      }
    }
  return 0;
}
