// Packing of weights and what it takes, as plain C functions.
#include <omp.h>

#include "pack.h"

using namespace orca;

extern "C" {

// Bytes that weights [n, k] take as groups and as channels.
int64_t orca_groups_bytes(int64_t n, int64_t k) {
  const Packed w{nullptr, nullptr, nullptr, n, k};
  return w.num_tiles() * w.groups_tile_bytes();
}

int64_t orca_channels_bytes(int64_t n, int64_t k) {
  const Packed w{nullptr, nullptr, nullptr, n, k};
  return w.num_tiles() * w.channels_tile_bytes();
}

// Scales that they have as channels: whole tiles of them.
int64_t orca_num_scales(int64_t n) { return Packed{nullptr, nullptr, nullptr, n, 0}.num_tiles() * kLanes; }

// The most rows for which products use groups.
int64_t orca_few_rows() { return kFewRows; }

// Packs w [n, k] float32 as groups. Returns the largest error relative to its group's largest weight; beyond `most` of it,
// the rest is left as it is.
float orca_pack_groups(const float* w, int64_t n, int64_t k, uint8_t* groups, float most, int num_threads) {
  const Packed packed{groups, nullptr, nullptr, n, k};
  float worst = 0.0f;
#pragma omp parallel for schedule(static) reduction(max : worst) num_threads(num_threads)
  for (int64_t tile = 0; tile < packed.num_tiles(); ++tile)
    for (int64_t lane = 0; lane < kLanes && worst < most; ++lane)
      worst = std::max(worst, pack_groups(w, packed, tile * kLanes + lane, groups));
  return worst;
}

// Packs w [n, k] float32 as channels; scales [orca_num_scales(n)].
void orca_pack_channels(const float* w, int64_t n, int64_t k, uint8_t* channels, float* scales, int num_threads) {
  const Packed packed{nullptr, channels, scales, n, k};
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t tile = 0; tile < packed.num_tiles(); ++tile)
    for (int64_t lane = 0; lane < kLanes; ++lane) pack_channel(w, packed, tile * kLanes + lane, channels, scales);
}

// Some rows of packed weights as float32, from groups where they are there: out [count, k].
void orca_gather_rows(const Packed* w, const int64_t* row_numbers, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) unpack_row(*w, row_numbers[i], out + i * w->k);
}
}
