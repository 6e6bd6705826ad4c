// Sixteen float lanes, with what AVX-512 offers or in plain loops that the compiler vectorises for what there is.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define ORCA_AVX512 1
#include <immintrin.h>
#else
#define ORCA_AVX512 0
#if defined(__F16C__)
#include <immintrin.h>
#endif
#endif

namespace orca {

constexpr int kLanes = 16;

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

// Calls call(row, count) for pieces of at most kMost rows, all of nearly the same size; count is a constant.
template <int kMost, typename Call>
inline void in_pieces(int64_t row, int64_t end, Call call) {
  for (int64_t pieces = (end - row + kMost - 1) / kMost; pieces > 0; --pieces) {
    const int64_t count = (end - row + pieces - 1) / pieces;
    switch (count) {
      case 1: call(row, std::integral_constant<int, 1>()); break;
      case 2: call(row, std::integral_constant<int, 2>()); break;
      case 3: call(row, std::integral_constant<int, 3>()); break;
      case 4: call(row, std::integral_constant<int, 4>()); break;
      case 5: call(row, std::integral_constant<int, 5>()); break;
      case 6: call(row, std::integral_constant<int, 6>()); break;
      case 7: call(row, std::integral_constant<int, std::min(kMost, 7)>()); break;
      case 8: call(row, std::integral_constant<int, std::min(kMost, 8)>()); break;
    }
    row += count;
  }
}

#if ORCA_AVX512

// e^x to about 2 ulp; underflows to 0, never returns more than e^88 (Cephes' polynomial).
inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-103.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

#endif

}  // namespace orca
