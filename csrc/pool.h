// Threads that compute: N, including the caller of parallel_for. Each starts on its own contiguous
// share of the work, so that it reads one stream of memory, and claims it in small chunks; a thread that is done takes half
// of what another one has left. So a thread that loses its core delays the others by one chunk at most.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace tidegate {

// While it is above 0 some other thread of this process is about to need a core for a moment, and threads that only wait
// offer theirs at every turn. A kernel that preempts lazily (Linux from 6.12 on) does not take it from them.
inline std::atomic<int> g_cores_wanted{0};

// Threads of this process sleep on it, and somebody wakes them now and then. That takes a system call, after which the kernel
// may well give the caller's core to whom it woke; so an idle thread of a pool makes it, if there is one. Not an atomic's
// wait(), which yields before it sleeps: to whoever has yielded the kernel gives its core late.
class Bell {
 public:
  // To be compared before going to sleep.
  std::uint32_t rings() const { return rings_.load(std::memory_order_seq_cst); }
  void sleep(std::uint32_t rings_seen) {
    std::unique_lock lock(mutex_);
    rung_.wait(lock, [&] { return rings_.load(std::memory_order_relaxed) != rings_seen; });
  }
  // All sleepers will wake up soon.
  void ask() {
    wanted_.store(true, std::memory_order_seq_cst);
    if (idle_threads_.load(std::memory_order_seq_cst) == 0) ring_if_wanted();
  }

  // A pool's thread has nothing to do until leave(), and calls ring_if_wanted() again and again meanwhile.
  void enter() { idle_threads_.fetch_add(1, std::memory_order_seq_cst); }
  void leave() {
    idle_threads_.fetch_sub(1, std::memory_order_seq_cst);
    ring_if_wanted();
  }
  // True if it has rung.
  bool ring_if_wanted() {
    if (!wanted_.load(std::memory_order_seq_cst) || !wanted_.exchange(false, std::memory_order_seq_cst)) return false;
    {
      const std::lock_guard lock(mutex_);
      rings_.fetch_add(1, std::memory_order_seq_cst);
    }
    rung_.notify_all();
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable rung_;
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<bool> wanted_{false};
  std::atomic<int> idle_threads_{0};
};
inline Bell g_bell;

class Pool {
 public:
  // threads >= 1. Starts threads - 1 workers.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end, thread) for ranges of at most `grain` that cover [0, count) once each, and returns when all are
  // done. `thread` is in [0, threads()). The body must not throw and must not call parallel_for. Callers on several
  // threads are served one after the other.
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(count, grain, [](void* self, std::int64_t begin, std::int64_t end, int thread) {
      (*static_cast<Plain*>(self))(begin, end, thread);
    }, const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Call = void (*)(void* self, std::int64_t begin, std::int64_t end, int thread);

  void run(std::int64_t count, std::int64_t grain, Call call, void* self);
  bool work_one(int thread);
  bool claim_and_run(std::size_t thread, std::size_t from);
  bool has_work() const;
  void worker(int thread);

  // What a thread has left of the current job: (job number << 32) | first chunk << 16 | end. Every claim is a compare-and-
  // swap of the whole word, so it succeeds only while that very job has unclaimed chunks, which is exactly while the fields
  // of `job_` are stable. A word that is empty belongs to its thread; between jobs, to run().
  struct alignas(64) Share {
    std::atomic<std::uint64_t> word{0};
  };
  std::vector<Share> shares_;
  std::uint64_t job_number_ = 0;
  alignas(64) std::atomic<std::uint32_t> unfinished_{0};  // chunks of the current job that are not done
  alignas(64) std::atomic<std::uint32_t> wakeups_{0};     // what idle workers sleep on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  struct Job {
    std::atomic<Call> call{nullptr};
    std::atomic<void*> self{nullptr};
    std::atomic<std::int64_t> count{0}, grain{1};
  } job_;
  std::mutex callers_;
  std::vector<std::thread> workers_;
};

}  // namespace tidegate
