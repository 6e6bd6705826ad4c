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
#include "amx.h"
#include "rows.h"

namespace orca {

constexpr int kPair = 2;               // tiles that are computed together
constexpr int64_t kFewRows = 8;        // for which the 4-bit form is used; measured, see docs/performance.md
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

#if ORCA_AVX512

inline void store(const Packed& w, const Target& to, int64_t row, int64_t column, __m512 value) {
  const int64_t left = w.n - column;  // the last tile may reach beyond the matrix
  const __mmask16 mask = left >= kLanes ? 0xffff : left > 0 ? static_cast<__mmask16>((1 << left) - 1) : 0;
  float* y = to.at(row, column);
  if (to.bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, to.bias + column));
  if (to.add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, y));
  _mm512_mask_storeu_ps(y, mask, value);
}

inline __m512 half16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __m512i columns4(const int8_t* x) {
  int four;
  std::memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

// M rows times one tile, 4 bits.
template <int M>
inline void multiply_groups(const Packed& w, const Rows& rows, int64_t row, int64_t tile, const Target& to) {
  const int64_t row_groups = rows.k / kRowGroup;
  const uint8_t* from = w.groups + tile * w.groups_tile_bytes();
  const int8_t* x = rows.q + row * rows.k;
  const float* scale = rows.scale + row * row_groups;
  const float* sum = rows.sum + row * row_groups * 2;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 acc[M];
  for (int m = 0; m < M; ++m) acc[m] = _mm512_setzero_ps();
  for (int64_t g = 0; g < row_groups * 2; ++g, x += kGroup, from += kGroupBytes) {
    __m512i dot[M];
    for (int m = 0; m < M; ++m) dot[m] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512i both = _mm512_loadu_si512(from + c * 64);
      const __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        dot[m] = _mm512_dpbusd_epi32(dot[m], first, columns4(x + m * rows.k + 4 * c));
        dot[m] = _mm512_dpbusd_epi32(dot[m], second, columns4(x + m * rows.k + 16 + 4 * c));
      }
    }
    const __m512 scales = half16(from + 256), offsets = half16(from + 288);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(scale[m * row_groups + g / 2]));
      acc[m] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot[m]), acc[m]);
      acc[m] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(sum[m * row_groups * 2 + g]), acc[m]);
    }
  }
  for (int m = 0; m < M; ++m) store(w, to, row + m, tile * kLanes, acc[m]);
}

// M rows times a pair of tiles, 8 bits.
template <int M>
inline void multiply_channels(const Packed& w, const Rows& rows, int64_t row, int64_t tile, const Target& to) {
  const int64_t row_groups = rows.k / kRowGroup, tile_bytes = w.channels_tile_bytes();
  const uint8_t* from = w.channels + tile * tile_bytes;
  const int8_t* x = rows.q + row * rows.k;
  const float* scale = rows.scale + row * row_groups;
  const int32_t* start = rows.start + row * row_groups;
  __m512 acc[kPair][M];
  for (int r = 0; r < kPair; ++r)
    for (int m = 0; m < M; ++m) acc[r][m] = _mm512_setzero_ps();
  for (int64_t g = 0; g < row_groups; ++g, x += kRowGroup, from += kRowGroup * kLanes) {
    __m512i dot[kPair][M];
    for (int m = 0; m < M; ++m) dot[0][m] = dot[1][m] = _mm512_set1_epi32(start[m * row_groups + g]);
#pragma GCC unroll 16
    for (int c = 0; c < kRowGroup / 4; ++c) {
      const __m512i first = _mm512_loadu_si512(from + c * 64), second = _mm512_loadu_si512(from + tile_bytes + c * 64);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const __m512i four = columns4(x + m * rows.k + 4 * c);
        dot[0][m] = _mm512_dpbusd_epi32(dot[0][m], first, four);
        dot[1][m] = _mm512_dpbusd_epi32(dot[1][m], second, four);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m512 by = _mm512_set1_ps(scale[m * row_groups + g]);
      for (int r = 0; r < kPair; ++r) acc[r][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][m]), by, acc[r][m]);
    }
  }
  for (int r = 0; r < kPair; ++r) {
    const __m512 scales = _mm512_loadu_ps(w.scales + (tile + r) * kLanes);
    for (int m = 0; m < M; ++m) store(w, to, row + m, (tile + r) * kLanes, _mm512_mul_ps(acc[r][m], scales));
  }
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
      const __m512i start = _mm512_set1_epi32(rows.start[at]);
      const __m512 by = _mm512_set1_ps(rows.scale[at]);
      for (int r = 0; r < kPair; ++r) {
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(start, _mm512_load_si512(dot[m][r])));
        _mm512_store_ps(acc[m][r], _mm512_fmadd_ps(sum, by, g ? _mm512_load_ps(acc[m][r]) : _mm512_setzero_ps()));
      }
    }
  }
  for (int r = 0; r < kPair; ++r) {
    const __m512 scales = _mm512_loadu_ps(w.scales + (tile + r) * kLanes);
    for (int64_t m = 0; m < count; ++m)
      store(w, to, row + m, (tile + r) * kLanes, _mm512_mul_ps(_mm512_load_ps(acc[m][r]), scales));
  }
}

#endif

// Rows [row, end) times a pair of tiles; `few`: the iteration has few rows.
inline void multiply_pair(const Packed& w, const Rows& rows, int64_t row, int64_t end, int64_t tile, bool few, const Target& to) {
  if (few && w.groups) {
    for (int r = 0; r < kPair; ++r)
      in_pieces<8>(row, end, [&](int64_t at, auto count) { multiply_groups<count>(w, rows, at, tile + r, to); });
    return;
  }
#if ORCA_AMX
  if (amx_is_on()) {
    for (; end - row >= kAmxFewestRows; row += std::min<int64_t>(end - row, kAmxRows))
      multiply_channels_amx(w, rows, row, std::min<int64_t>(end - row, kAmxRows), tile, to);
  }
#endif
  in_pieces<6>(row, end, [&](int64_t at, auto count) { multiply_channels<count>(w, rows, at, tile, to); });
}

#else

inline void multiply_pair(const Packed& w, const Rows& rows, int64_t row, int64_t end, int64_t tile, bool few, const Target& to) {
  const int64_t row_groups = rows.k / kRowGroup;
  for (int64_t item = row * kPair; item < end * kPair; ++item) {
    const int64_t at = item / kPair, t = tile + item % kPair;
    const int8_t* x = rows.q + at * rows.k;
    float acc[kLanes] = {};
    if (few && w.groups) {
      const uint8_t* from = w.groups + t * w.groups_tile_bytes();
      for (int64_t g = 0; g < row_groups * 2; ++g, x += kGroup, from += kGroupBytes) {
        int32_t dot[kLanes] = {};
        for (int c = 0; c < 4; ++c)
          for (int lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < 4; ++j) {
              const int q = from[c * 64 + 4 * lane + j];
              dot[lane] += (q & 15) * x[4 * c + j] + (q >> 4) * x[16 + 4 * c + j];
            }
        for (int lane = 0; lane < kLanes; ++lane)
          acc[lane] += half_to_float(from + 256 + 2 * lane) * rows.scale[at * row_groups + g / 2] * static_cast<float>(dot[lane]) +
                       half_to_float(from + 288 + 2 * lane) * rows.sum[at * row_groups * 2 + g];
      }
    } else {
      const uint8_t* from = w.channels + t * w.channels_tile_bytes();
      for (int64_t g = 0; g < row_groups; ++g, x += kRowGroup, from += kRowGroup * kLanes) {
        int32_t dot[kLanes];
        std::fill(dot, dot + kLanes, rows.start[at * row_groups + g]);
        for (int c = 0; c < kRowGroup / 4; ++c)
          for (int lane = 0; lane < kLanes; ++lane)
            for (int j = 0; j < 4; ++j) dot[lane] += from[c * 64 + 4 * lane + j] * x[4 * c + j];
        for (int lane = 0; lane < kLanes; ++lane) acc[lane] += static_cast<float>(dot[lane]) * rows.scale[at * row_groups + g];
      }
      for (int lane = 0; lane < kLanes; ++lane) acc[lane] *= w.scales[t * kLanes + lane];
    }
    for (int64_t lane = 0, column = t * kLanes; lane < kLanes && column < w.n; ++lane, ++column) {
      float& y = *to.at(at, column);
      y = acc[lane] + (to.bias ? to.bias[column] : 0.0f) + (to.add ? y : 0.0f);
    }
  }
}

#endif

// Rows [row, end), not few of them, times all weights.
inline void linear(const Packed& w, const Rows& rows, int64_t row, int64_t end, const Target& to) {
  for (int64_t tile = 0; tile < w.num_tiles(); tile += kPair) multiply_pair(w, rows, row, end, tile, false, to);
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
