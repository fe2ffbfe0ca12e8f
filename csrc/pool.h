// The one thread pool of the process. N threads including the caller of parallel_for. Each starts on its own contiguous
// share of the work, so that it reads one stream of memory, and claims it in small chunks; a thread that is done takes half
// of what another one has left. So a thread that loses its core delays the others by one chunk at most.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace tidegate {

// While it is above 0 some other thread of this process is about to need a core for a moment, and threads that only wait
// offer theirs at every turn. A kernel that preempts lazily (Linux from 6.12 on) does not take it from them.
inline std::atomic<int> g_cores_wanted{0};

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
