// Threads that read expert blobs from files into slots. Demand loads go first; a speculative one steps aside for them after the
// request to the system that is in flight.
//
// A slot is empty -> loading -> ready (or failed) -> loading ...; which ready slots are pinned is the cache's book. The
// state is one atomic a slot, which compute waits on; the queues are behind one mutex, never held during a read. All member
// functions may be called from any thread; loads into a slot, and cancelling them, are one thread's business at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "file_set.h"
#include "slots.h"

namespace tidegate {

enum class SlotState : int { kEmpty, kLoading, kReady, kFailed };

struct LoadRequest {
  int file = 0;
  std::int64_t offset = 0;
  std::int64_t nbytes = 0;
  std::uint32_t crc32 = 0;  // compared only by a verifying loader
  bool demand = true;
  int layer = -1, expert = -1;  // for who explains a failure
};

// Why a slot is kFailed. ``offset`` is where the blob begins; ``got_bytes`` of ``wanted_bytes`` arrived. ``error`` is an
// errno, 0 at the end of the file. A complete read with another checksum has got_bytes == wanted_bytes.
struct LoadFailure {
  int file = 0;
  std::int64_t offset = 0;
  std::int64_t wanted_bytes = 0;
  std::int64_t got_bytes = 0;
  int error = 0;
  std::uint32_t wanted_crc32 = 0;
  std::uint32_t got_crc32 = 0;
  int layer = -1, expert = -1;
};

struct LoaderOptions {
  int num_threads = 2;
  std::int64_t chunk_bytes = 4 << 20;  // a load can be cancelled or overtaken between requests of so many bytes
  bool verify = false;                 // compare the crc32 of every blob
};

struct LoaderCounters {
  std::int64_t demand_loads = 0;       // completed, promoted ones included
  std::int64_t speculative_loads = 0;  // completed without having been promoted
  std::int64_t cancelled_loads = 0;
  std::int64_t failed_loads = 0;
  std::int64_t promoted_loads = 0;
  std::int64_t overtaken_loads = 0;  // times a speculative load stepped aside for a demand load
  std::int64_t read_bytes = 0;       // everything that was read, useful or not
  std::int64_t wasted_bytes = 0;     // read for loads that were cancelled
  std::int64_t waits = 0;            // wait_ready calls that found the slot still loading
  std::int64_t wait_ns = 0;          // time spent in them
  std::int64_t busy_ns = 0;          // time the threads spent in reads, all threads together
  std::int64_t wakes = 0;            // times a load found every queue empty and a thread asleep
  std::int64_t wake_ns = 0;          // until that thread took a load
};

class Loader final : public SlotSource {
 public:
  // ``slots``: the first byte of each slot, every one with room for slot_bytes; 4096-aligned ones are read directly.
  Loader(std::shared_ptr<FileSet> files, std::vector<std::uint8_t*> slots, std::int64_t slot_bytes,
         const LoaderOptions& options);
  ~Loader() override;
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Queues a load and returns. Throws std::invalid_argument for a range that cannot be, std::logic_error for a slot that
  // is loading already, or after close().
  void load(int slot, const LoadRequest& request);
  // True if the slot is empty afterwards, false if it is ready. Does not wait for a read in flight: a load queued into
  // the slot meanwhile starts when that read has ended.
  bool cancel(int slot);
  // A speculative load becomes a demand load; anything else is left as it is.
  void promote(int slot);

  const std::uint8_t* wait_ready(int slot) override;
  bool is_ready(int slot) const override;
  SlotState state(int slot) const;
  // Meaningful while the slot is kFailed.
  LoadFailure failure(int slot) const;
  LoaderCounters counters() const;

  // Cancels what is queued or in flight and joins the threads. Ready slots stay readable. Idempotent.
  void close();

 private:
  struct alignas(64) Slot {
    std::atomic<int> state{static_cast<int>(SlotState::kEmpty)};
    std::atomic<std::uint64_t> ticket{0};  // the wanted load; a read under another ticket is abandoned
    std::atomic<bool> demand{false};
    // Behind mutex_:
    bool queued = false;
    bool busy = false;      // a thread reads into the slot
    LoadRequest request;
    std::int64_t done_bytes = 0;  // progress of an overtaken load
    std::uint32_t crc32 = 0;
    LoadFailure failure;
  };
  struct Job {
    int slot;
    std::uint64_t ticket;
    LoadRequest request;
    std::int64_t done_bytes;
    std::uint32_t crc32;
    int error;
  };
  enum class JobEnd { kComplete, kFailed, kStopped };

  void work();
  Job take();
  JobEnd read_chunks(Job& job);
  void finish(const Job& job, JobEnd end);
  void abandon(Slot& slot);
  void enqueue(int slot, bool first);
  void want_core(bool wanted);
  void dequeue(int slot);
  void set_state(Slot& slot, SlotState state);
  Slot& at(int slot) const;

  std::shared_ptr<FileSet> files_;
  const std::vector<std::uint8_t*> addresses_;
  const std::int64_t slot_bytes_;
  const LoaderOptions options_;
  std::unique_ptr<Slot[]> slots_;

  mutable std::mutex mutex_;
  std::deque<int> demand_;
  std::deque<int> speculative_;
  std::atomic<int> num_demand_queued_{0};
  std::uint64_t last_ticket_ = 0;
  int num_asleep_ = 0;
  bool wants_core_ = false;     // from the first load until all threads are asleep
  std::int64_t roused_ns_ = 0;  // since when a thread that was asleep has something to do; 0: none
  bool closing_ = false;
  LoaderCounters counters_;  // behind mutex_, but for the four below
  std::atomic<std::int64_t> read_bytes_{0};
  std::atomic<std::int64_t> waits_{0};
  std::atomic<std::int64_t> wait_ns_{0};
  std::atomic<std::int64_t> busy_ns_{0};
  std::vector<std::thread> threads_;
};

}  // namespace tidegate
