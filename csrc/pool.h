// A persistent team of threads for jobs of microseconds.
#pragma once
#include <stdint.h>

#include <atomic>
#include <type_traits>

namespace qk {

// Spins for about 20 us, then yields: two processes on one core must not wait out each other's time slices.
class Backoff {
 public:
  void pause();

 private:
  int spins_ = 0;
};

// Meets all threads of the team; reusable without reset. Costs about 0.15 us when nobody is late.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait();

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> generation_{0};
};

using Job = void (*)(void* context, int id, int threads, Barrier& barrier);

// Runs job(context, 0 .. threads-1) with the caller as thread 0; one job at a time, later callers wait.
// The team is made on first use, from the CPUs this process is allowed: QUANTKIT_THREADS sets its size,
// QUANTKIT_PIN=0 leaves the threads unpinned. A forked child makes its own.
void run_team(Job job, void* context);
int team_size();

// The same for a callable: run_team_on([&](int id, int threads, Barrier&) { ... }).
template <class Callable>
void run_team_on(Callable&& callable) {
  run_team(
      [](void* context, int id, int threads, Barrier& barrier) {
        (*static_cast<std::remove_reference_t<Callable>*>(context))(id, threads, barrier);
      },
      &callable);
}

// The share of `count` items that thread `id` of `threads` does: [first, second).
struct Share {
  int64_t first, last;
  Share(int64_t count, int id, int threads) : first(count * id / threads), last(count * (id + 1) / threads) {}
};

}  // namespace qk
