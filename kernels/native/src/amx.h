// The matrix unit of Intel processors (AMX): 16 x 64 bytes times 64 x 16 bytes in one instruction.
//
// ORCA_AMX is 1 where it is there, and 2 for a plain version of the one function that touches it, so that everything around
// it is tested on processors without.
#pragma once
#include "simd.h"

#if !defined(ORCA_AMX)
#if defined(__AMX_INT8__) && ORCA_AVX512
#define ORCA_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define ORCA_AMX 0
#endif
#endif

namespace orca {

#if ORCA_AMX

constexpr int64_t kAmxRows = 32;        // of activations, at a time
constexpr int64_t kAmxFewestRows = 12;  // fewer are left to AVX-512

#endif

#if ORCA_AMX == 1

// Asks the kernel for the unit's registers, for the whole process, once.
inline bool amx_is_on() {
  static const bool on = [] {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return on;
}

// Shapes of this thread's tile registers: 0 to 3 are sums, 4 and 5 rows of activations, 6 and 7 weights.
struct AmxTiles {
  AmxTiles() {
    if (!amx_is_on()) return;
    alignas(64) uint8_t config[64] = {1};  // palette 1
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;  // bytes of a row
      config[48 + i] = 16;      // rows
    }
    asm volatile("" ::"r"(config) : "memory");  // GCC does not know that all of it is read
    _tile_loadconfig(config);
  }
  ~AmxTiles() {
    if (amx_is_on()) _tile_release();
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// dot[m][r] = 64 numbers of row m times tile r. Rows beyond count are read, up to a multiple of 16, and mean nothing.
inline void amx_multiply(const int8_t* x, int64_t stride, int64_t count, const uint8_t* first, const uint8_t* second,
                         int32_t (*dot)[2][kLanes]) {
  constexpr int kStride = 2 * kLanes * sizeof(int32_t);
  asm volatile("" ::: "memory");  // nor that tile loads read memory
  _tile_loadd(6, first, 64);
  _tile_loadd(7, second, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, x, stride);
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(1, 4, 7);
  if (count > 16) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, x + 16 * stride, stride);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
    _tile_stored(2, dot[16][0], kStride);
    _tile_stored(3, dot[16][1], kStride);
  }
  _tile_stored(0, dot[0][0], kStride);
  _tile_stored(1, dot[0][1], kStride);
}

#else

struct AmxTiles {};

#if ORCA_AMX

inline bool amx_is_on() { return true; }

inline void amx_multiply(const int8_t* x, int64_t stride, int64_t count, const uint8_t* first, const uint8_t* second,
                         int32_t (*dot)[2][kLanes]) {
  for (int64_t m = 0; m < (count > 16 ? 32 : 16); ++m)
    for (int lane = 0; lane < kLanes; ++lane) {
      dot[m][0][lane] = dot[m][1][lane] = 0;
      for (int column = 0; column < 64; ++column) {
        const int at = column / 4 * 64 + 4 * lane + column % 4, value = x[m * stride + column];
        dot[m][0][lane] += value * first[at];
        dot[m][1][lane] += value * second[at];
      }
    }
}

#endif
#endif

}  // namespace orca
