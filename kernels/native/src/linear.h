// Matrix products of quantised weights [n, k] with quantised rows.
//
// Weights lie in tiles of 16 rows, an even number of them; columns are padded to a multiple of 64. There are two forms,
// and the number of rows decides which is used: few rows wait for memory, many for the multipliers.
//
// Groups, 4 bits (as GGUF's Q4_1; Q4_0 is a special case): a tile is a chain of groups of 32 columns, w = scale * q +
// offset with one scale and one offset for each row and group: 4 x 64 bytes, of which byte 4r + j of vector c holds column
// 4c + j of row r in its low half and 16 + 4c + j in its high one, then 16 scales and 16 offsets as half-precision numbers.
//
// Channels, 8 bits: w = scale * (q - 128) with one scale for each row. Byte 4r + j of vector c holds column 4c + j of row r:
// what the byte products of AVX-512 and of AMX both take. Their sums are exact within a group of 64 columns, and groups
// are added in one order, so that all processors with either get the same numbers, bit for bit.
#pragma once
#include <limits>

#include "amx.h"
#include "byte_products.h"

namespace orca {

constexpr int kPair = 2;               // tiles that are computed together
constexpr int kMostGroups = ORCA_AVX512 ? 8 : 4;  // rows that are multiplied together, so that sums stay in registers
constexpr int kMostChannels = 6;
constexpr int kUnroll = ORCA_VNNI ? 16 : 1;  // without it GCC multiplies all columns before it adds, through memory
// Rows for which the 4-bit form is used; measured, see docs/performance.md. Where AVX2 is all there is, it is the quicker one
// for any number: its sums have their place in 16 bits.
constexpr int64_t kFewRows = ORCA_VNNI || kWidth < 8 ? 8 : std::numeric_limits<int64_t>::max();
constexpr int64_t kRowBlock = 96;      // rows of activations that stay in the L2 cache while weights pass by
constexpr int64_t kRowsAtOnce = 32;    // a product may read so many rows together, whatever they hold
constexpr int kGroupBytes = kLanes * kGroup / 2 + 4 * kLanes;

inline bool are_few(int64_t num_rows) { return num_rows <= kFewRows; }

struct Packed {
  const uint8_t* groups;    // null: these weights have no exact 4-bit form
  const uint8_t* channels;
  const float* scales;      // of channels, [16 * tiles]
  int64_t n, k;

  int64_t padded_k() const { return padded(k, kRowGroup); }
  int64_t num_tiles() const { return padded(n, kPair * kLanes) / kLanes; }
  int64_t groups_tile_bytes() const { return padded_k() / kGroup * kGroupBytes; }
  int64_t channels_tile_bytes() const { return padded_k() * kLanes; }
};

// Where products go: y[row - first_row, column - first_column] = product (+ bias) (+ what is there).
struct Target {
  float* y;
  int64_t stride;
  const float* bias = nullptr;  // by column
  bool add = false;
  int64_t first_row = 0, first_column = 0;

  float* at(int64_t row, int64_t column) const { return y + (row - first_row) * stride + column - first_column; }
};

// Sums of kWidth columns of one row, to where they go.
inline void put(const Packed& w, const Target& to, int64_t row, int64_t column, Floats value) {
  const int64_t left = w.n - column;  // the last tile may reach beyond the matrix
  float* y = to.at(row, column);
  if (left >= kWidth) {
    if (to.bias) value += load(to.bias + column);
    if (to.add) value += load(y);
    store(y, value);
  } else {
    for (int64_t i = 0; i < left; ++i) y[i] = value[i] + (to.bias ? to.bias[column + i] : 0.0f) + (to.add ? y[i] : 0.0f);
  }
}

// M rows times one tile, 4 bits.
template <int M>
inline void multiply_groups(const Packed& w, const Rows& rows, int64_t row, int64_t tile, const Target& to) {
  constexpr int kVectors = kLanes / kWidth;
  const int64_t row_groups = rows.k / kRowGroup;
  const uint8_t* from = w.groups + tile * w.groups_tile_bytes();
  const int8_t* x = rows.q + row * rows.k;
  const float* scale = rows.scale + row * row_groups;
  const float* sum = rows.sum + row * row_groups * 2;
  Floats acc[M][kVectors] = {};
  for (int64_t g = 0; g < row_groups * 2; ++g, x += kGroup, from += kGroupBytes) {
    Ints dot[M][kVectors] = {};
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      Words first[kVectors], second[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const Words both = load<Words>(from + c * 64 + v * 4 * kWidth);
        first[v] = both & 0x0f0f0f0fu, second[v] = both >> 4 & 0x0f0f0f0fu;
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        for (int v = 0; v < kVectors; ++v) {
          dot[m][v] = add_small(dot[m][v], first[v], x + m * rows.k + 4 * c);
          dot[m][v] = add_small(dot[m][v], second[v], x + m * rows.k + 16 + 4 * c);
        }
    }
    for (int v = 0; v < kVectors; ++v) {
      const Floats scales = load_halves(from + 256 + v * 2 * kWidth), offsets = load_halves(from + 288 + v * 2 * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Floats factor = scales * scale[m * row_groups + g / 2];
        acc[m][v] += factor * __builtin_convertvector(total(dot[m][v]), Floats);
        acc[m][v] += offsets * sum[m * row_groups * 2 + g];
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < kVectors; ++v) put(w, to, row + m, tile * kLanes + v * kWidth, acc[m][v]);
}

// M rows times two vectors of columns from `column` on, 8 bits. `fetch`: ask for the ones after them meanwhile, into the L2
// cache, since the rows that follow keep memory idle.
template <int M>
inline void multiply_channels(const Packed& w, const Rows& rows, int64_t row, int64_t column, bool fetch, const Target& to) {
  const int64_t row_groups = rows.k / kRowGroup;
  const uint8_t* first = w.channels + column / kLanes * w.channels_tile_bytes() + column % kLanes * 4;
  const uint8_t* second = first + (kWidth < kLanes ? 4 * kWidth : w.channels_tile_bytes());
  constexpr int64_t kStride = std::max(1, 2 * kWidth / kLanes);  // tiles
  const int8_t* x = rows.q + row * rows.k;
  const float* scale = rows.scale + row * row_groups;
  const int32_t* start = rows.start + row * row_groups;
  Floats acc[M][2] = {};
  for (int64_t g = 0; g < row_groups; ++g, x += kRowGroup, first += kRowGroup * kLanes, second += kRowGroup * kLanes) {
    const Group<M> columns(x, rows.k);
    Ints dot[M][2];
    for (int m = 0; m < M; ++m) dot[m][0] = dot[m][1] = all(start[m * row_groups + g]);
    if (fetch)
#pragma GCC unroll kUnroll
      for (int c = 0; c < kRowGroup / 4; ++c)
        for (const uint8_t* from : {first, second}) __builtin_prefetch(from + kStride * w.channels_tile_bytes() + c * 64, 0, 2);
#pragma GCC unroll kUnroll
    for (int c = 0; c < kRowGroup / 4; ++c) {
      const Words w0 = load<Words>(first + c * 64), w1 = load<Words>(second + c * 64);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        dot[m][0] = columns.add(dot[m][0], w0, m, c);
        dot[m][1] = columns.add(dot[m][1], w1, m, c);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < 2; ++v) acc[m][v] += __builtin_convertvector(dot[m][v], Floats) * scale[m * row_groups + g];
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < 2; ++v) put(w, to, row + m, column + v * kWidth, acc[m][v] * load(w.scales + column + v * kWidth));
}

#if ORCA_AMX

// Up to 32 rows times a pair of tiles, 8 bits, in the processor's matrix unit: the same sums in the same order.
inline void multiply_channels_amx(const Packed& w, const Rows& rows, int64_t row, int64_t count, int64_t tile, const Target& to) {
  const int64_t row_groups = rows.k / kRowGroup, tile_bytes = w.channels_tile_bytes();
  const uint8_t* from = w.channels + tile * tile_bytes;
  alignas(64) int32_t dot[kAmxRows][kPair][kLanes];
  alignas(64) float acc[kAmxRows][kPair][kLanes];
  for (int64_t g = 0; g < row_groups; ++g, from += kRowGroup * kLanes) {
    amx_multiply(rows.q + row * rows.k + g * kRowGroup, rows.k, count, from, from + tile_bytes, dot);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t at = (row + m) * row_groups + g;
      for (int r = 0; r < kPair; ++r) {
        Floats sum = g ? load(acc[m][r]) : Floats{};
        sum += __builtin_convertvector(all(rows.start[at]) + load<Ints>(dot[m][r]), Floats) * rows.scale[at];
        store(acc[m][r], sum);
      }
    }
  }
  for (int64_t m = 0; m < count; ++m)
    for (int r = 0; r < kPair; ++r) {
      const int64_t column = (tile + r) * kLanes;
      put(w, to, row + m, column, load(acc[m][r]) * load(w.scales + column));
    }
}

#endif

// Rows [row, end) times a pair of tiles; `few`: the iteration has few rows.
inline void multiply_pair(const Packed& w, const Rows& rows, int64_t row, int64_t end, int64_t tile, bool few, const Target& to) {
  if (few && w.groups) {
    for (int r = 0; r < kPair; ++r)
      in_pieces<kMostGroups>(row, end, [&](int64_t at, auto count) { multiply_groups<count>(w, rows, at, tile + r, to); });
    return;
  }
#if ORCA_AMX
  if (amx_is_on()) {
    for (; end - row >= kAmxFewestRows; row += std::min<int64_t>(end - row, kAmxRows))
      multiply_channels_amx(w, rows, row, std::min<int64_t>(end - row, kAmxRows), tile, to);
  }
#endif
  for (int64_t column = tile * kLanes; column < (tile + kPair) * kLanes; column += 2 * kWidth)
    in_pieces<kMostChannels>(row, end, [&](int64_t at, auto count) { multiply_channels<count>(w, rows, at, column, at == row, to); });
}

// Rows [row, end) times all weights; `few`: the iteration has few rows.
inline void linear(const Packed& w, const Rows& rows, int64_t row, int64_t end, bool few, const Target& to) {
  for (int64_t tile = 0; tile < w.num_tiles(); tile += kPair) multiply_pair(w, rows, row, end, tile, few, to);
}

// All rows: called by every thread of a team, which waits at the end. A piece of the work is some tiles times some rows.
inline void linear_in_team(const Packed& w, const Rows& rows, int64_t num_rows, const Target& to) {
  const int64_t pairs = w.num_tiles() / kPair, blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t pairs_at_once = std::max<int64_t>(1, std::min<int64_t>(4, pairs / 8));
  const int64_t pieces = (pairs + pairs_at_once - 1) / pairs_at_once;
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < blocks * pieces; ++item) {
    const int64_t row = item / pieces * kRowBlock, end = std::min(num_rows, row + kRowBlock);
    const int64_t first = item % pieces * pairs_at_once, last = std::min(pairs, first + pairs_at_once);
    for (int64_t pair = first; pair < last; ++pair) multiply_pair(w, rows, row, end, pair * kPair, are_few(num_rows), to);
  }
}

}  // namespace orca
