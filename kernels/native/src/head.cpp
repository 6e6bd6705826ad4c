// The most likely token of each of some rows: norm, product and the place of its largest number, without logits in memory.
#include <omp.h>

#include <limits>
#include <vector>

#include "elementwise.h"
#include "linear.h"

using namespace orca;

namespace {

constexpr int kPairsAtOnce = 16;  // of tiles: columns among which a thread finds a row's largest before it compares with others
constexpr int kColumns = kPair * kLanes;

// The largest number so far and the first place of it.
struct Peak {
  float value = -std::numeric_limits<float>::infinity();
  int64_t token = 0;
  bool is_number = true;  // none of the numbers so far was NaN

  void take(const Peak& other) {
    is_number = is_number && other.is_number;
    if (other.value > value || (other.value == value && other.token < token)) value = other.value, token = other.token;
  }
};

// Of one row among the columns of some pairs of tiles, column by column of a pair.
struct Lanes {
  float value[kColumns];
  int32_t pair[kColumns];
  int32_t nan[kColumns];
};

void start(Lanes& lanes, const float* values, int32_t pair) {
#pragma omp simd
  for (int i = 0; i < kColumns; ++i) {
    lanes.value[i] = values[i];
    lanes.pair[i] = pair;
    lanes.nan[i] = values[i] != values[i];
  }
}

void take(Lanes& lanes, const float* values, int32_t pair) {
#pragma omp simd
  for (int i = 0; i < kColumns; ++i) {
    const bool larger = values[i] > lanes.value[i];
    lanes.value[i] = larger ? values[i] : lanes.value[i];
    lanes.pair[i] = larger ? pair : lanes.pair[i];
    lanes.nan[i] |= values[i] != values[i];
  }
}

Peak largest(const Lanes& lanes) {
  Peak peak;
  for (int i = 0; i < kColumns; ++i) {
    const Peak lane{lanes.value[i], int64_t{lanes.pair[i]} * kColumns + i, !lanes.nan[i]};
    peak.take(lane);
  }
  return peak;
}

bool is_finite(const float* x, int64_t n) {
  float zero = 0.0f;
#pragma omp simd reduction(+ : zero)
  for (int64_t i = 0; i < n; ++i) zero += x[i] * 0.0f;
  return zero == 0.0f;
}

}  // namespace

extern "C" {

// tokens[i] = the column of the largest product of w with hidden[row_numbers[i]], normed; the first of equals; 0 and
// valid[i] = 0 where the row or the products hold NaN, or infinity is the largest. Returns how many are not valid. hidden [any, w.k].
int64_t orca_greedy_head(const Packed* w, const float* hidden, const int64_t* row_numbers, int64_t num_rows, const float* norm_weight,
                         double eps, int64_t* tokens, uint8_t* valid, int num_threads) {
  const int64_t k = w->padded_k(), room = padded(num_rows, kRowsAtOnce);
  std::vector<int8_t> q(room * k);
  std::vector<float> scale(room * (k / kRowGroup)), sum(room * (k / kGroup));
  std::vector<int32_t> starts(room * (k / kRowGroup));
  const Rows rows{q.data(), scale.data(), starts.data(), sum.data(), k};
  std::vector<Peak> peaks(num_rows);
  const int64_t pairs = w->num_tiles() / kPair, pieces = (pairs + kPairsAtOnce - 1) / kPairsAtOnce;
  const int64_t blocks = (num_rows + kRowBlock - 1) / kRowBlock;
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(w->k);
    std::vector<Peak> found(num_rows);
    std::vector<Lanes> lanes(std::min<int64_t>(num_rows, kRowBlock));
    alignas(64) float products[kRowBlock][kColumns];
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) {
      norm_row(hidden + row_numbers[i] * w->k, w->k, {norm_weight, eps}, line.data());
      quantize_row(line.data(), w->k, rows, i);
      found[i].is_number = is_finite(line.data(), w->k);  // numbers of 8 bits would not tell
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < blocks * pieces; ++item) {
      const int64_t row = item / pieces * kRowBlock, end = std::min(num_rows, row + kRowBlock);
      const int64_t first = item % pieces * kPairsAtOnce, last = std::min(pairs, first + kPairsAtOnce);
      for (int64_t pair = first; pair < last; ++pair) {
        const int64_t columns = std::min<int64_t>(kColumns, w->n - pair * kColumns);
        multiply_pair(*w, rows, row, end, pair * kPair, are_few(num_rows), {products[0], kColumns, nullptr, false, row, pair * kColumns});
        for (int64_t at = 0; at < end - row; ++at) {
          std::fill(products[at] + columns, products[at] + kColumns, -std::numeric_limits<float>::infinity());
          if (pair == first)
            start(lanes[at], products[at], static_cast<int32_t>(pair));
          else
            take(lanes[at], products[at], static_cast<int32_t>(pair));
        }
      }
      for (int64_t at = 0; at < end - row; ++at) found[row + at].take(largest(lanes[at]));
    }
#pragma omp critical(orca_greedy_head)
    for (int64_t i = 0; i < num_rows; ++i) peaks[i].take(found[i]);
  }
  int64_t num_invalid = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    valid[i] = peaks[i].is_number && std::isfinite(peaks[i].value);
    tokens[i] = valid[i] ? peaks[i].token : 0;
    num_invalid += !valid[i];
  }
  return num_invalid;
}
}
