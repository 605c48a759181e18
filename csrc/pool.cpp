#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace qk {

void Backoff::pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
  if (++spins_ >= 2000) std::this_thread::yield();
}

void Barrier::wait() {
  if (count_ == 1) return;
  const unsigned generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  Backoff backoff;
  while (generation_.load(std::memory_order_acquire) == generation) backoff.pause();
}

namespace {

#ifdef __linux__
using CpuMask = cpu_set_t;
bool get_mask(CpuMask* mask) { return sched_getaffinity(0, sizeof *mask, mask) == 0; }
void set_mask(const CpuMask& mask) { sched_setaffinity(0, sizeof mask, &mask); }  // a refusal leaves us unpinned: slower, not wrong
CpuMask only(int cpu) {
  CpuMask mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  return mask;
}
std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  CpuMask mask;
  if (get_mask(&mask)) {
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
      if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
    }
  }
  return cpus;
}
// Moves the calling thread off the cores of the workers for the time of a job. It must not stay pinned: threads that
// Python starts later would inherit the mask, and PyTorch's own would all land on one core. The three system calls
// cost 5 us here, half a small layer, so they are made only when the thread stands where it should not.
class PinCaller {
 public:
  explicit PinCaller(int cpu) : pinned_(cpu >= 0 && sched_getcpu() != cpu && get_mask(&before_)) {
    if (pinned_) set_mask(only(cpu));
  }
  ~PinCaller() {
    if (pinned_) set_mask(before_);
  }

 private:
  CpuMask before_;
  const bool pinned_;
};
void pin_worker(int cpu) {
  if (cpu >= 0) set_mask(only(cpu));
}
#else
std::vector<int> allowed_cpus() { return {}; }
class PinCaller {
 public:
  explicit PinCaller(int) {}
};
void pin_worker(int) {}
#endif

bool env_is(const char* name, const char* value) {
  const char* text = getenv(name);
  return text && !strcmp(text, value);
}

class Team {
 public:
  explicit Team(int threads, std::vector<int> cpus) : threads_(threads), cpus_(std::move(cpus)), barrier_(threads) {
    for (int id = 1; id < threads; id++) std::thread([this, id] { work(id); }).detach();
  }

  int size() const { return threads_; }

  void run(Job job, void* context) {
    std::lock_guard<std::mutex> one_at_a_time(callers_);
    PinCaller pin(cpu(0));
    job_ = job;
    context_ = context;
    running_.store(threads_ - 1, std::memory_order_relaxed);
    posted_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(bed_);
      wake_.notify_all();
    }
    job(context, 0, threads_, barrier_);
    Backoff backoff;
    while (running_.load(std::memory_order_acquire) > 0) backoff.pause();
  }

 private:
  int cpu(int id) const { return cpus_.empty() ? -1 : cpus_[static_cast<size_t>(id) % cpus_.size()]; }

  void work(int id) {
    pin_worker(cpu(id));
    unsigned seen = 0;
    for (;;) {
      await(seen);
      seen++;
      job_(context_, id, threads_, barrier_);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Jobs come in bursts, a linear after a linear: watch for a few milliseconds before sleeping.
  void await(unsigned seen) {
    Backoff backoff;
    for (int i = 0; i < 20000; i++) {
      if (posted_.load(std::memory_order_acquire) != seen) return;
      backoff.pause();
    }
    std::unique_lock<std::mutex> lock(bed_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return posted_.load(std::memory_order_seq_cst) != seen; });
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

  const int threads_;
  const std::vector<int> cpus_;
  Barrier barrier_;
  std::mutex callers_, bed_;
  std::condition_variable wake_;
  std::atomic<unsigned> posted_{0};
  std::atomic<int> running_{0}, asleep_{0};
  Job job_ = nullptr;
  void* context_ = nullptr;
};

std::atomic<Team*> team{nullptr};
std::atomic<pid_t> team_pid{0};
std::mutex team_lock;

// Never destroyed: its threads end with the process. After fork() the child has none of them and starts anew.
Team& the_team() {
  Team* current = team.load(std::memory_order_acquire);
  if (current && team_pid.load(std::memory_order_relaxed) == getpid()) return *current;
  std::lock_guard<std::mutex> lock(team_lock);
  current = team.load(std::memory_order_acquire);
  if (current && team_pid.load(std::memory_order_relaxed) == getpid()) return *current;
  std::vector<int> cpus = allowed_cpus();
  int threads = cpus.empty() ? static_cast<int>(std::thread::hardware_concurrency()) : static_cast<int>(cpus.size());
  if (const char* wanted = getenv("QUANTKIT_THREADS")) threads = atoi(wanted);
  if (threads < 1) threads = 1;
  if (env_is("QUANTKIT_PIN", "0") || static_cast<size_t>(threads) > cpus.size()) cpus.clear();  // never two on a core
  current = new Team(threads, std::move(cpus));
  team_pid.store(getpid(), std::memory_order_relaxed);
  team.store(current, std::memory_order_release);
  return *current;
}

}  // namespace

void run_team(Job job, void* context) { the_team().run(job, context); }
int team_size() { return the_team().size(); }

}  // namespace qk
