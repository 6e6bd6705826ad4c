// Vectors as wide as the processor has them, by the vector extensions of GCC and clang: operators work lane by lane, and
// a * b + c is one instruction where there is one.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define ORCA_AVX512 1
#else
#define ORCA_AVX512 0
#endif

namespace orca {

constexpr int kLanes = 16;  // rows of a tile of weights

#if ORCA_AVX512
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kWidth)));
using Ints = int32_t __attribute__((vector_size(4 * kWidth)));
using Words = uint32_t __attribute__((vector_size(4 * kWidth)));   // the same bits, shifted without their sign
using Shorts = int16_t __attribute__((vector_size(4 * kWidth)));

template <typename Vector>
inline Vector load(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const float* from) { return load<Floats>(from); }
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// The same number in all lanes.
inline Floats all(float x) { return x - Floats{}; }
inline Ints all(int32_t x) { return x - Ints{}; }

// The first `count` lanes; all where it is larger.
inline Ints first_lanes(int64_t count) {
  Ints lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i;
  return lanes < all(static_cast<int32_t>(std::min<int64_t>(count, kWidth)));
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Of all lanes, two halves at a time.
template <typename Combine>
inline float combine_lanes(Floats x, Combine combine) {
  float lanes[kWidth];
  store(lanes, x);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}

inline float bf16_to_float(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Rounds to nearest, ties to even.
inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // not a number stays one
  bits += 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>(bits >> 16);
}

// IEEE half precision, from memory.
inline float half_to_float(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(mantissa), -24);
  const uint32_t bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
#endif
}

inline Floats load_halves(const uint8_t* from) {
#if ORCA_AVX512
  return _mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
  return _mm256_cvtph_ps(load<__m128i>(from));
#else
  Floats x;
  for (int i = 0; i < kWidth; ++i) x[i] = half_to_float(from + 2 * i);
  return x;
#endif
}

// e^x to about 2 ulp (Cephes' polynomial): 0 where it would be below the smallest normal number, e^88 at most.
inline Floats exp(Floats x) {
  const Ints underflow = x < all(-87.3f);
  x = x > all(88.0f) ? all(88.0f) : x;
  // Added to a number of this size, a fraction has no place: what is left in the lowest bits is x / ln 2, rounded.
  const Floats rounded = x * 1.44269504f + 12582912.0f;
  const Floats n = rounded - 12582912.0f;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const Words exponent = ((Words)rounded << 23) + 0x3f800000u;
  return underflow ? Floats{} : p * (Floats)exponent;
}

// Calls call(row, count) for pieces of at most kMost rows, all of nearly the same size; count is a constant.
template <int kMost, typename Call>
inline void in_pieces(int64_t row, int64_t end, Call call) {
  for (int64_t pieces = (end - row + kMost - 1) / kMost; pieces > 0; --pieces) {
    const int64_t count = (end - row + pieces - 1) / pieces;
    switch (count) {
      case 1: call(row, std::integral_constant<int, 1>()); break;
      case 2: call(row, std::integral_constant<int, std::min(kMost, 2)>()); break;
      case 3: call(row, std::integral_constant<int, std::min(kMost, 3)>()); break;
      case 4: call(row, std::integral_constant<int, std::min(kMost, 4)>()); break;
      case 5: call(row, std::integral_constant<int, std::min(kMost, 5)>()); break;
      case 6: call(row, std::integral_constant<int, std::min(kMost, 6)>()); break;
      case 7: call(row, std::integral_constant<int, std::min(kMost, 7)>()); break;
      case 8: call(row, std::integral_constant<int, std::min(kMost, 8)>()); break;
    }
    row += count;
  }
}

}  // namespace orca
