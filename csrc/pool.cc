#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace tidegate {
namespace {

// Long enough to bridge the gap between two operations of a decode step, short enough not to steal a core.
constexpr auto kSpin = std::chrono::microseconds(50);
// Then others may have the core, but as long as nobody wants it the thread stays awake: a wait for a load is about this long.
constexpr auto kYield = std::chrono::microseconds(1000);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or until kYield has passed; true if done.
template <class Done>
bool spin_until(Done&& done) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > kYield) return false;
    if (waited > kSpin) sched_yield();
  }
}

std::uint32_t chunks_left(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket); }

}  // namespace

Pool::Pool(int threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("a pool needs 1 to 1024 threads");
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { worker(t); });
}

Pool::~Pool() {
  stop_.store(true);
  wakeups_.fetch_add(1);
  wakeups_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void Pool::run(std::int64_t count, std::int64_t grain, Call call, void* self) {
  if (count <= 0) return;
  // The number of chunks must fit the ticket's 32 bits.
  grain = std::max({grain, std::int64_t{1}, count >> 31});
  if (workers_.empty() || count <= grain) {
    for (std::int64_t begin = 0; begin < count; begin += grain) call(self, begin, std::min(begin + grain, count), 0);
    return;
  }
  const std::lock_guard lock(callers_);
  const auto chunks = static_cast<std::uint32_t>((count + grain - 1) / grain);
  job_.call.store(call, std::memory_order_relaxed);
  job_.self.store(self, std::memory_order_relaxed);
  job_.count.store(count, std::memory_order_relaxed);
  job_.grain.store(grain, std::memory_order_relaxed);
  unfinished_.store(chunks, std::memory_order_relaxed);
  const std::uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(number << 32 | chunks, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    wakeups_.fetch_add(1);
    wakeups_.notify_all();
  }
  while (work_one(0)) {
  }
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  while (!spin_until(finished)) {
    const std::uint32_t left = unfinished_.load(std::memory_order_acquire);
    if (left != 0) unfinished_.wait(left, std::memory_order_acquire);
  }
}

// Claims and runs one chunk of the current job; false if none was left.
bool Pool::work_one(int thread) {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (chunks_left(ticket) != 0) {
    const Call call = job_.call.load(std::memory_order_relaxed);
    void* const self = job_.self.load(std::memory_order_relaxed);
    const std::int64_t count = job_.count.load(std::memory_order_relaxed);
    const std::int64_t grain = job_.grain.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    // Chunks are handed out in rising order: neighbours in memory are read at about the same time.
    const std::int64_t chunks = (count + grain - 1) / grain;
    const std::int64_t begin = (chunks - chunks_left(ticket)) * grain;
    call(self, begin, std::min(begin + grain, count), thread);
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
    return true;
  }
  return false;
}

void Pool::worker(int thread) {
  const auto work_or_stop = [this] { return chunks_left(ticket_.load(std::memory_order_acquire)) != 0 || stop_.load(); };
  while (!stop_.load()) {
    if (work_one(thread) || spin_until(work_or_stop)) continue;
    // Announce the sleep before the last look, so that run() either sees a sleeper or this thread sees the job.
    const std::uint32_t seen = wakeups_.load();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (chunks_left(ticket_.load(std::memory_order_seq_cst)) == 0 && !stop_.load()) wakeups_.wait(seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace tidegate
