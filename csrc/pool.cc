#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "spin.h"

namespace tidegate {
namespace {

// Long enough to bridge the gap between two operations of a decode step, short enough not to steal a core.
constexpr auto kSpin = std::chrono::microseconds(50);
// Then others may have the core, but as long as nobody wants it the thread stays awake: a wait for a load is about this long.
constexpr auto kYield = std::chrono::microseconds(1000);

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
    if (waited > kSpin || g_cores_wanted.load(std::memory_order_relaxed) > 0) sched_yield();
  }
}

constexpr std::int64_t kMostChunks = 0xffff;  // a share's bounds have 16 bits each

std::uint64_t first_of(std::uint64_t word) { return word >> 16 & 0xffff; }
std::uint64_t end_of(std::uint64_t word) { return word & 0xffff; }
std::uint64_t make_word(std::uint64_t job, std::uint64_t first, std::uint64_t end) { return job << 32 | first << 16 | end; }

}  // namespace

Pool::Pool(int threads) : shares_(static_cast<std::size_t>(std::clamp(threads, 1, 1024))) {
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
  grain = std::max({grain, std::int64_t{1}, (count + kMostChunks - 1) / kMostChunks});
  if (workers_.empty() || count <= grain) {
    for (std::int64_t begin = 0; begin < count; begin += grain) call(self, begin, std::min(begin + grain, count), 0);
    return;
  }
  const std::lock_guard lock(callers_);
  const auto chunks = static_cast<std::uint64_t>((count + grain - 1) / grain);
  job_.call.store(call, std::memory_order_relaxed);
  job_.self.store(self, std::memory_order_relaxed);
  job_.count.store(count, std::memory_order_relaxed);
  job_.grain.store(grain, std::memory_order_relaxed);
  unfinished_.store(static_cast<std::uint32_t>(chunks), std::memory_order_relaxed);
  ++job_number_;
  for (std::uint64_t t = 0, n = shares_.size(); t < n; ++t)
    shares_[t].word.store(make_word(job_number_, t * chunks / n, (t + 1) * chunks / n), std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    wakeups_.fetch_add(1);
    wakeups_.notify_all();
  }
  g_bell.ring_if_wanted();  // see Loader::wait_ready
  while (work_one(0)) {
  }
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  while (!spin_until(finished)) {
    const std::uint32_t left = unfinished_.load(std::memory_order_acquire);
    if (left != 0) unfinished_.wait(left, std::memory_order_acquire);
  }
}

// Claims and runs one chunk of the current job: the first of the thread's own share, or else of the second half of another
// one's, whose rest becomes its own. False if it found none.
bool Pool::work_one(int thread) {
  const auto n = shares_.size(), self = static_cast<std::size_t>(thread);
  for (std::size_t i = 0; i < n; ++i)
    if (claim_and_run(self, (self + i) % n)) return true;
  return false;
}

bool Pool::claim_and_run(std::size_t thread, std::size_t from) {
  std::atomic<std::uint64_t>&share = shares_[from].word, &own = shares_[thread].word;
  std::uint64_t word = share.load(std::memory_order_acquire);
  while (first_of(word) < end_of(word)) {
    const Call call = job_.call.load(std::memory_order_relaxed);
    void* const self = job_.self.load(std::memory_order_relaxed);
    const std::int64_t count = job_.count.load(std::memory_order_relaxed);
    const std::int64_t grain = job_.grain.load(std::memory_order_relaxed);
    const std::uint64_t job = word >> 32, first = first_of(word), end = end_of(word);
    std::uint64_t mine = first, left = make_word(job, first + 1, end);
    if (from != thread) {
      // What it takes would overwrite a share that run() has just given it, or run() would overwrite it.
      const std::uint64_t old = own.load(std::memory_order_acquire);
      if (old >> 32 != job || first_of(old) < end_of(old)) return false;
      mine = first + (end - first) / 2;
      left = make_word(job, first, mine);
    }
    if (!share.compare_exchange_weak(word, left, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    if (from != thread) own.store(make_word(job, mine + 1, end), std::memory_order_release);
    const std::int64_t begin = static_cast<std::int64_t>(mine) * grain;
    call(self, begin, std::min(begin + grain, count), static_cast<int>(thread));
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
    return true;
  }
  return false;
}

bool Pool::has_work() const {
  return std::any_of(shares_.begin(), shares_.end(), [](const Share& share) {
    const std::uint64_t word = share.word.load(std::memory_order_seq_cst);
    return first_of(word) < end_of(word);
  });
}

void Pool::worker(int thread) {
  const auto work_or_stop = [this] { return has_work() || stop_.load(); };
  while (!stop_.load()) {
    if (work_one(thread)) continue;
    g_bell.enter();
    const bool found = spin_until([&] {
      if (g_bell.ring_if_wanted()) sched_yield();  // whoever wakes up has little to do, and that before this thread is busy
      return work_or_stop();
    });
    g_bell.leave();
    if (found) continue;
    // Announce the sleep before the last look, so that run() either sees a sleeper or this thread sees the job.
    const std::uint32_t seen = wakeups_.load();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!has_work() && !stop_.load()) wakeups_.wait(seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace tidegate
