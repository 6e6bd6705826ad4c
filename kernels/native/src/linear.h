// Matrix products of quantised weights with rows that are quantised on the way (as llama.cpp's Q8_1).
//
// A weight matrix [n, k] lies in tiles of 16 rows; a tile is a chain of groups of 32 columns. w = scale * q + offset
// with one scale and one offset for each row and group (GGUF's Q4_1; Q4_0 and Q8_0 are special cases). q is unsigned.
//   4 bits: 4 x 64 bytes; byte 4r + j of vector c holds column 4c + j of row r in its low half, 16 + 4c + j in its high
//   8 bits: 8 x 64 bytes; byte 4r + j of vector c holds column 4c + j of row r
// and then 16 scales and 16 offsets as half-precision numbers.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

namespace orca {

constexpr int kGroup = 32;

struct Packed {
  const uint8_t* data;
  int64_t n, k;
  int64_t bits;

  int64_t tile_bytes() const { return k / kGroup * group_bytes(); }
  int64_t group_bytes() const { return kLanes * kGroup * bits / 8 + kLanes * 4; }
};

// Rows of activations: x = scale * q, q in [-127, 127], one scale for each group; sum is scale times the sum of q.
struct Rows {
  int8_t* q;
  float* scale;
  float* sum;
  int64_t k;
};

inline void quantize_row(const float* x, const Rows& rows, int64_t row) {
  const int64_t groups = rows.k / kGroup;
  int8_t* q = rows.q + row * rows.k;
  float* scales = rows.scale + row * groups;
  float* sums = rows.sum + row * groups;
  for (int64_t g = 0; g < groups; ++g, x += kGroup, q += kGroup) {
#if ORCA_AVX512
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const float peak = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const float scale = peak / 127.0f;
    const __m512 inverse = _mm512_set1_ps(peak > 0.0f ? 127.0f / peak : 0.0f);
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtsepi32_epi8(qa));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtsepi32_epi8(qb));
    const int total = _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
#else
    float peak = 0.0f;
    for (int i = 0; i < kGroup; ++i) peak = std::max(peak, std::fabs(x[i]));
    const float scale = peak / 127.0f, inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
    int total = 0;
    for (int i = 0; i < kGroup; ++i) {
      const int value = static_cast<int>(std::nearbyint(x[i] * inverse));
      q[i] = static_cast<int8_t>(value);
      total += value;
    }
#endif
    scales[g] = scale;
    sums[g] = scale * static_cast<float>(total);
  }
}

#if ORCA_AVX512

inline __m512 half16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __m512i columns4(const int8_t* x) {
  int four;
  std::memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

// M rows of activations times R tiles of weights, from column group `first` on; acc[r][m] is one number for each row of a tile.
template <int M, int R, int kBits>
inline __attribute__((always_inline)) void multiply(const uint8_t* w, int64_t tile_bytes, const Rows& rows, int64_t row,
                                                    __m512 (&acc)[R][M]) {
  const int64_t groups = rows.k / kGroup;
  const int8_t* x = rows.q + row * rows.k;
  const float* scale = rows.scale + row * groups;
  const float* sum = rows.sum + row * groups;
  constexpr int kVectors = kBits;  // of 64 bytes: 16 rows x 32 columns
  const __m512i low = _mm512_set1_epi8(15);
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) acc[r][m] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, x += kGroup, w += kVectors * 64 + 64) {
    __m512i dot[R][M];
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) dot[r][m] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      __m512i first[R], second[R];
      for (int r = 0; r < R; ++r) {
        const uint8_t* from = w + r * tile_bytes;
        if (kBits == 4) {
          const __m512i both = _mm512_loadu_si512(from + c * 64);
          first[r] = _mm512_and_si512(both, low);
          second[r] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        } else {
          first[r] = _mm512_loadu_si512(from + c * 64);
          second[r] = _mm512_loadu_si512(from + (c + 4) * 64);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512i a = columns4(x + m * rows.k + 4 * c), b = columns4(x + m * rows.k + 16 + 4 * c);
        for (int r = 0; r < R; ++r) {
          dot[r][m] = _mm512_dpbusd_epi32(dot[r][m], first[r], a);
          dot[r][m] = _mm512_dpbusd_epi32(dot[r][m], second[r], b);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      const uint8_t* constants = w + r * tile_bytes + kVectors * 64;
      const __m512 scales = half16(constants), offsets = half16(constants + 32);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(scale[m * groups + g]));
        acc[r][m] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(dot[r][m]), acc[r][m]);
        acc[r][m] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(sum[m * groups + g]), acc[r][m]);
      }
    }
  }
}

#endif

// Where products go: y[row, column] = product (+ bias) (+ what is there).
struct Target {
  float* y;
  int64_t stride;
  const float* bias;
  bool add;
};

#if ORCA_AVX512

template <int M, int R, int kBits>
inline void multiply_into(const Packed& w, const Rows& rows, int64_t row, int64_t tile, const Target& to) {
  __m512 acc[R][M];
  multiply<M, R, kBits>(w.data + tile * w.tile_bytes(), w.tile_bytes(), rows, row, acc);
  for (int r = 0; r < R; ++r) {
    const int64_t column = (tile + r) * kLanes;
    const int64_t left = w.n - column;  // the last tile may reach beyond the matrix
    const __mmask16 mask = left >= kLanes ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
    const __m512 bias = to.bias ? _mm512_maskz_loadu_ps(mask, to.bias + column) : _mm512_setzero_ps();
    for (int m = 0; m < M; ++m) {
      float* y = to.y + (row + m) * to.stride + column;
      __m512 value = _mm512_add_ps(acc[r][m], bias);
      if (to.add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, y));
      _mm512_mask_storeu_ps(y, mask, value);
    }
  }
}

template <int kBits>
inline void multiply_rows(const Packed& w, const Rows& rows, int64_t row, int64_t end, int64_t tile, const Target& to) {
  for (; row + 8 <= end; row += 8) multiply_into<8, 1, kBits>(w, rows, row, tile, to);
  if (row + 4 <= end) multiply_into<4, 1, kBits>(w, rows, row, tile, to), row += 4;
  if (row + 2 <= end) multiply_into<2, 1, kBits>(w, rows, row, tile, to), row += 2;
  if (row < end) multiply_into<1, 1, kBits>(w, rows, row, tile, to);
}

#else

template <int kBits>
inline void multiply_rows(const Packed& w, const Rows& rows, int64_t row, int64_t end, int64_t tile, const Target& to) {
  const int64_t groups = rows.k / kGroup;
  for (; row < end; ++row) {
    const uint8_t* from = w.data + tile * w.tile_bytes();
    const int8_t* x = rows.q + row * rows.k;
    float acc[kLanes] = {};
    for (int64_t g = 0; g < groups; ++g, x += kGroup, from += w.group_bytes()) {
      int32_t dot[kLanes] = {};
      for (int c = 0; c < kBits; ++c) {
        const uint8_t* vector = from + c * 64;
        for (int lane = 0; lane < kLanes; ++lane)
          for (int j = 0; j < 4; ++j) {
            const int q = vector[4 * lane + j];
            if (kBits == 4)
              dot[lane] += (q & 15) * x[4 * c + j] + (q >> 4) * x[16 + 4 * c + j];
            else
              dot[lane] += q * x[4 * c + j];
          }
      }
      const uint8_t* constants = from + kBits * 64;
      for (int lane = 0; lane < kLanes; ++lane)
        acc[lane] += half_to_float(constants + 2 * lane) * rows.scale[row * groups + g] * dot[lane] +
                     half_to_float(constants + 32 + 2 * lane) * rows.sum[row * groups + g];
    }
    for (int lane = 0; lane < kLanes && tile * kLanes + lane < w.n; ++lane) {
      const int64_t column = tile * kLanes + lane;
      float& y = to.y[row * to.stride + column];
      y = acc[lane] + (to.bias ? to.bias[column] : 0.0f) + (to.add ? y : 0.0f);
    }
  }
}

#endif

// All rows: called by every thread of a team; `barrier` free, the caller waits. Work is a tile times a block of rows.
inline void linear_in_team(const Packed& w, const Rows& rows, int64_t num_rows, const Target& to) {
  constexpr int64_t kRowBlock = 64;  // of activations: they stay in the L1 or L2 cache while tiles of weights pass by
  const int64_t tiles = (w.n + kLanes - 1) / kLanes, blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(8, tiles / 8));
  const int64_t chunks = (tiles + chunk - 1) / chunk;
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < blocks * chunks; ++item) {
    const int64_t first = item / chunks * kRowBlock, end = std::min(num_rows, first + kRowBlock);
    const int64_t from = item % chunks * chunk, until = std::min(tiles, from + chunk);
    for (int64_t tile = from; tile < until; ++tile) {
      if (w.bits == 4)
        multiply_rows<4>(w, rows, first, end, tile, to);
      else
        multiply_rows<8>(w, rows, first, end, tile, to);
    }
  }
}

}  // namespace orca
