// Work of a team of threads in pieces, phase after phase: each thread has pieces of its own, in whose memory it has worked
// before, and takes those of others once its own are done.
#pragma once
#include <omp.h>

#include <atomic>
#include <vector>

namespace orca {

class Shares {
 public:
  Shares(int64_t num_phases, int num_threads) : num_threads_(num_threads), taken_(num_phases * num_threads) {}

  // Calls work(piece) for each piece of a phase, on one thread; thread t's own are [start_of(t), start_of(t + 1)). Called by
  // every thread of a team, which does not wait for the others' at the end.
  template <typename StartOf, typename Work>
  void each(int64_t phase, StartOf start_of, Work work) {
    const int mine = omp_get_thread_num();
    for (int i = 0; i < num_threads_; ++i) {
      const int owner = (mine + i) % num_threads_;
      std::atomic<int64_t>& taken = taken_[phase * num_threads_ + owner].count;
      const int64_t first = start_of(owner), count = start_of(owner + 1) - first;
      for (int64_t piece; (piece = taken.fetch_add(1, std::memory_order_relaxed)) < count;) work(first + piece);
    }
  }

 private:
  struct alignas(64) Taken {  // a cache line each
    std::atomic<int64_t> count{0};
  };
  int num_threads_;
  std::vector<Taken> taken_;
};

}  // namespace orca
