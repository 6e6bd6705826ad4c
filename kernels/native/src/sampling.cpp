// The draw: one token for each row of logits, without sorting the row.
//
// A larger logit ranks first, the smaller id among equals. Each filter keeps the tokens that rank first, so that one place in
// the ranking, the last that is kept, tells what all of them leave. Where top-k and top-p end is looked for among few candidates,
// which a bound that always holds lets in; then what is kept is drawn from in the order of ids. Weights are probabilities relative
// to the row's most probable token. What a row gets depends on nothing but the row.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "simd.h"

using namespace orca;

namespace {

constexpr int64_t kBlock = 64;    // tokens that are weighed at a time, or passed over where none of them is kept
constexpr float kLeast = -40.0f;  // logarithm of the least weight: a random number of 32 bits cannot tell e^-40 from nothing
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Parameters of the rows, one number for each.
struct Sampling {
  const float* temperature;  // at least 1e-5
  const int32_t* top_k;      // 0: off; 1: greedy
  const float* top_p;        // 1: off
  const float* min_p;        // 0: off
  const double* uniform;     // in [0, 1)
};

struct Place {
  float logit;
  int32_t id;
};

inline bool ranks_before(const Place& a, const Place& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

struct Candidate {
  Place place;
  float weight;
};

// e^x for x from -87 to 0, without branches (Cephes).
inline float exp_of(float x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: a number added to it is rounded to an integer, which the last bits hold
  const float shifted = x * 1.44269504f + kWhole, n = shifted - kWhole;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

double sum(const float* w) {
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < kBlock; ++i) total += w[i];
  return total;
}

// Rows of one length, one after the other, in the same memory.
class Row {
 public:
  explicit Row(int64_t n) : n_(n), num_blocks_((n + kBlock - 1) / kBlock), peaks_(num_blocks_), sums_(num_blocks_) {}

  // Whether a token can be drawn: no logit is NaN, and the largest is finite.
  bool read(const float* logits) {
    logits_ = logits;
    std::fill(std::copy(logits + n_ / kBlock * kBlock, logits + n_, tail_), tail_ + kBlock, -kInfinity);
    peak_ = -kInfinity;
    int32_t not_numbers = 0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      const float* x = logits_of(block);
      float most = x[0];
#pragma omp simd reduction(max : most) reduction(| : not_numbers)
      for (int64_t i = 0; i < kBlock; ++i) {
        most = x[i] > most ? x[i] : most;
        not_numbers |= x[i] != x[i];
      }
      peaks_[block] = most;
      peak_ = std::max(peak_, most);
    }
    return !not_numbers && std::isfinite(peak_);
  }

  int64_t draw(float temperature, int64_t top_k, float top_p, float min_p, double uniform) {
    if (top_k == 1) return most_probable();
    temperature_ = temperature;
    inverse_temperature_ = 1.0f / temperature;
    last_ = least_with(kLeast);
    const bool is_limited = top_k > 0 && top_k < n_;
    if (is_limited || top_p < 1.0f) last_ = is_limited ? last_of_top_k(top_k, top_p) : last_of_top_p(top_p);
    if (min_p > 0.0f) last_ = std::min(last_, least_with(std::log(static_cast<double>(min_p))), ranks_before);
    return invert(uniform);
  }

 private:
  const float* logits_of(int64_t block) const { return (block + 1) * kBlock <= n_ ? logits_ + block * kBlock : tail_; }

  int64_t most_probable() const {
    const int64_t block = std::find(peaks_.begin(), peaks_.end(), peak_) - peaks_.begin();
    return std::find(logits_ + block * kBlock, logits_ + n_, peak_) - logits_;
  }

  float weight_of(float logit) const { return exp_of((logit - peak_) * inverse_temperature_); }

  // The last place that a token with a weight of this logarithm can have; minus infinity has none.
  Place least_with(double log_weight) const {
    const double logit = peak_ + std::min(log_weight, 0.0) * temperature_;
    return {static_cast<float>(std::max<double>(logit, std::numeric_limits<float>::lowest())), std::numeric_limits<int32_t>::max()};
  }

  // Weights of a block's tokens; 0 where they are not kept.
  void weigh(int64_t block, float* w) const {
    const float* x = logits_of(block);
    const int32_t first = static_cast<int32_t>(block * kBlock);
#pragma omp simd
    for (int32_t i = 0; i < kBlock; ++i) w[i] = weight_of(x[i]);
#pragma omp simd
    for (int32_t i = 0; i < kBlock; ++i) {
      const bool is_kept = (x[i] > last_.logit) | ((x[i] == last_.logit) & (first + i <= last_.id));
      w[i] = is_kept ? w[i] : 0.0f;
    }
  }

  // The sum of all weights, and those of the blocks.
  double sum_up() {
    alignas(64) float w[kBlock];
    double total = 0.0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      sums_[block] = 0.0;
      if (peaks_[block] < last_.logit) continue;
      weigh(block, w);
      total += sums_[block] = sum(w);
    }
    return total;
  }

  // Where top-k ends, and then top-p of what that leaves.
  Place last_of_top_k(int64_t top_k, float top_p) {
    collect(kth_peak(top_k));
    if (top_k < num_candidates_) {
      select(0, top_k - 1, num_candidates_);
      num_candidates_ = top_k;
    }
    return last_of_mass(top_p < 1.0f ? top_p * sum_of(0, num_candidates_) : kInfinity);
  }

  Place last_of_top_p(float top_p) {
    const double total = sum_up();
    // All tokens that weigh less than this are together less than half of what top-p may leave out.
    const double least = 0.5 * (1.0 - top_p) * total / static_cast<double>(n_);
    collect(least_with(std::log(least)).logit);
    return last_of_mass(top_p * total);
  }

  // A logit that at least k tokens reach, since in so many blocks one does; minus infinity where there are fewer blocks.
  float kth_peak(int64_t k) {
    if (k > num_blocks_) return -kInfinity;
    ordered_peaks_ = peaks_;
    std::nth_element(ordered_peaks_.begin(), ordered_peaks_.begin() + k - 1, ordered_peaks_.end(), std::greater<float>());
    return ordered_peaks_[k - 1];
  }

  // Takes as candidates all tokens with at least this logit that are kept so far.
  void collect(float least) {
    least = std::max(least, last_.logit);
    num_candidates_ = 0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (peaks_[block] < least) continue;
      if (static_cast<int64_t>(candidates_.size()) < num_candidates_ + kBlock) candidates_.resize(2 * candidates_.size() + kBlock);
      const float* x = logits_of(block);
      for (int64_t part = 0; part < kBlock; part += kLanes) {
        int32_t any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = part; i < part + kLanes; ++i) any |= x[i] >= least;
        if (!any) continue;
        for (int64_t i = part; i < part + kLanes; ++i) {
          candidates_[num_candidates_].place = {x[i], static_cast<int32_t>(block * kBlock + i)};
          num_candidates_ += x[i] >= least;
        }
      }
    }
    for (int64_t i = 0; i < num_candidates_; ++i) candidates_[i].weight = weight_of(candidates_[i].place.logit);
  }

  // Of the candidates from first to end, puts the one that ranks at `middle` there, and those that rank before it before it.
  void select(int64_t first, int64_t middle, int64_t end) {
    std::nth_element(candidates_.begin() + first, candidates_.begin() + middle, candidates_.begin() + end,
                     [](const Candidate& a, const Candidate& b) { return ranks_before(a.place, b.place); });
  }

  double sum_of(int64_t first, int64_t end) const {
    double total = 0.0;
    for (int64_t i = first; i < end; ++i) total += candidates_[i].weight;
    return total;
  }

  // The last of the fewest most probable candidates whose weights sum to this, or of all.
  Place last_of_mass(double mass) {
    int64_t first = 0, end = num_candidates_;  // it is between these
    while (end - first > 1) {
      const int64_t middle = (first + end) / 2;
      select(first, middle, end);
      const double part = sum_of(first, middle);
      if (part < mass) {
        mass -= part;
        first = middle;
      } else {
        end = middle;
      }
    }
    return candidates_[first].place;
  }

  // The token at which the sum of weights, in the order of ids, exceeds this part of the whole.
  int64_t invert(double uniform) {
    alignas(64) float w[kBlock];
    const double target = uniform * sum_up();
    double reached = 0.0;
    int64_t block = 0, token = 0;
    while (reached + sums_[block] <= target) reached += sums_[block++];
    weigh(block, w);
    for (int64_t i = 0; i < kBlock && reached <= target; ++i) {
      if (w[i] > 0.0f) token = block * kBlock + i;
      reached += w[i];
    }
    return token;
  }

  const int64_t n_, num_blocks_;
  const float* logits_ = nullptr;
  float tail_[kBlock];        // the last block, where it is not whole
  std::vector<float> peaks_;  // the largest logit of each block
  std::vector<double> sums_;  // of the weights of each block
  std::vector<float> ordered_peaks_;
  std::vector<Candidate> candidates_;
  int64_t num_candidates_ = 0;
  float peak_ = 0.0f, temperature_ = 1.0f, inverse_temperature_ = 1.0f;
  Place last_{};  // that is kept
};

}  // namespace

extern "C" {

// tokens[i] is drawn from row i of logits [num_rows, n]; 0, and valid[i] = 0, where the row holds NaN or infinity, or nothing but
// minus infinity.
void orca_sample(const float* logits, int64_t num_rows, int64_t n, const Sampling* sampling, int64_t* tokens, uint8_t* valid,
                 int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows > 1)
  {
    Row row(n);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_rows; ++i) {
      const float temperature = sampling->temperature[i], top_p = sampling->top_p[i], min_p = sampling->min_p[i];
      valid[i] = row.read(logits + i * n);
      tokens[i] = valid[i] ? row.draw(temperature, sampling->top_k[i], top_p, min_p, sampling->uniform[i]) : 0;
    }
  }
}
}
