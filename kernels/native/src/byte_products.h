// Products of bytes, weights without a sign times activations with one, four columns of kWidth rows at a time: sums are
// exact whatever the processor has for them.
#pragma once
#include "rows.h"

#if ORCA_AVX512 || defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define ORCA_VNNI 1
#else
#define ORCA_VNNI 0
#endif

namespace orca {

inline int32_t four_bytes(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return four;
}

#if ORCA_VNNI

// Each lane of acc + its four bytes of w times the four numbers at x.
inline Ints add_bytes(Ints acc, Words w, const int8_t* x) {
#if ORCA_AVX512
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)all(four_bytes(x)));
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)all(four_bytes(x)));
#else
  return (Ints)_mm256_dpbusd_epi32((__m256i)acc, (__m256i)w, (__m256i)all(four_bytes(x)));
#endif
}

// A group of 64 columns of M rows, `stride` apart, ready to be multiplied.
template <int M>
class Group {
 public:
  Group(const int8_t* x, int64_t stride) : x_(x), stride_(stride) {}
  Ints add(Ints acc, Words w, int m, int four) const { return add_bytes(acc, w, x_ + m * stride_ + 4 * four); }

 private:
  const int8_t* x_;
  int64_t stride_;
};

// The same with weights of 4 bits; a sum of at most 32 columns, which total() makes whole.
inline Ints add_small(Ints acc, Words w, const int8_t* x) { return add_bytes(acc, w, x); }
inline Ints total(Ints acc) { return acc; }

#else

// In each lane, the sum of the products of its two 16-bit numbers.
inline Ints multiply_pairs(Ints a, Ints b) {
#if defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((Ints)((Words)a << 16) >> 16) * ((Ints)((Words)b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// A group of 64 columns of M rows, `stride` apart, ready to be multiplied: the first and third of every four, and the second
// and fourth, as pairs of 16 bits, in which the product of two bytes has its place whatever they are.
template <int M>
class Group {
 public:
  Group(const int8_t* x, int64_t stride) {
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < kRowGroup / 4; i += kWidth) {
        const Shorts four = load<Shorts>(x + m * stride + 4 * i);
        const Shorts even = four << 8 >> 8, odd = four >> 8;
        std::memcpy(even_[m] + i, &even, sizeof even);
        std::memcpy(odd_[m] + i, &odd, sizeof odd);
      }
  }
  Ints add(Ints acc, Words w, int m, int four) const {
    return acc + multiply_pairs((Ints)(w & 0x00ff00ffu), all(even_[m][four])) +
           multiply_pairs((Ints)(w >> 8 & 0x00ff00ffu), all(odd_[m][four]));
  }

 private:
  alignas(4 * kWidth) int32_t even_[M][kRowGroup / 4], odd_[M][kRowGroup / 4];
};

#if defined(__AVX2__)

// The same with weights of 4 bits: 16 products of 15 times 127 at most have their place in 16 bits.
inline Ints add_small(Ints acc, Words w, const int8_t* x) {
  const __m256i products = _mm256_maddubs_epi16((__m256i)w, (__m256i)all(four_bytes(x)));
  return (Ints)_mm256_add_epi16((__m256i)acc, products);
}
inline Ints total(Ints acc) { return multiply_pairs(acc, all(0x00010001)); }

#else

inline Ints add_small(Ints acc, Words w, const int8_t* x) {
  const auto pair = [](int first, int second) { return all(static_cast<int32_t>((first & 0xffff) | static_cast<uint32_t>(second) << 16)); };
  return acc + multiply_pairs((Ints)(w & 0x00ff00ffu), pair(x[0], x[2])) + multiply_pairs((Ints)(w >> 8 & 0x00ff00ffu), pair(x[1], x[3]));
}
inline Ints total(Ints acc) { return acc; }

#endif
#endif

}  // namespace orca
