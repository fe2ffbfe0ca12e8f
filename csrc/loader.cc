#include "loader.h"

#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "clock.h"
#include "crc32.h"
#include "pool.h"
#include "spin.h"

namespace tidegate {
namespace {

constexpr int kSpins = 200;  // a few microseconds: longer spinning starves whoever shares the core
// Then others may have the core, but as long as nobody wants it this thread stays awake: waking up costs a tenth of a load.
constexpr std::int64_t kYieldNs = 2'000'000;

}  // namespace

Loader::Loader(std::shared_ptr<FileSet> files, std::vector<std::uint8_t*> slots, std::int64_t slot_bytes,
               const LoaderOptions& options)
    : files_(std::move(files)),
      addresses_(std::move(slots)),
      slot_bytes_(slot_bytes),
      options_(options),
      slots_(std::make_unique<Slot[]>(addresses_.size())) {
  if (options_.num_threads < 1) throw std::invalid_argument("a loader needs at least one thread");
  if (options_.chunk_bytes < kDirectAlignment || options_.chunk_bytes % kDirectAlignment != 0) {
    throw std::invalid_argument("chunk_bytes must be a multiple of 4096");
  }
  for (int i = 0; i < options_.num_threads; ++i) threads_.emplace_back([this] { work(); });
}

Loader::~Loader() { close(); }

Loader::Slot& Loader::at(int slot) const {
  if (slot < 0 || static_cast<std::size_t>(slot) >= addresses_.size()) {
    throw std::out_of_range("slot " + std::to_string(slot) + " of " + std::to_string(addresses_.size()));
  }
  return slots_[slot];
}

void Loader::set_state(Slot& slot, SlotState state) {
  slot.state.store(static_cast<int>(state), std::memory_order_release);
  slot.state.notify_all();
}

void Loader::enqueue(int slot, bool first) {
  Slot& s = slots_[slot];
  auto& queue = s.demand.load(std::memory_order_relaxed) ? demand_ : speculative_;
  if (num_asleep_ > 0 && demand_.empty() && speculative_.empty()) roused_ns_ = now_ns();
  want_core(true);
  first ? queue.push_front(slot) : queue.push_back(slot);
  s.queued = true;
  num_demand_queued_.store(static_cast<int>(demand_.size()), std::memory_order_relaxed);
  if (num_asleep_ > 0) g_bell.ask();
}

// Behind mutex_.
void Loader::want_core(bool wanted) {
  if (wanted != wants_core_) g_cores_wanted.fetch_add(wanted ? 1 : -1, std::memory_order_relaxed);
  wants_core_ = wanted;
}

void Loader::dequeue(int slot) {
  Slot& s = slots_[slot];
  std::erase(s.demand.load(std::memory_order_relaxed) ? demand_ : speculative_, slot);
  s.queued = false;
  num_demand_queued_.store(static_cast<int>(demand_.size()), std::memory_order_relaxed);
}

void Loader::abandon(Slot& slot) {
  ++counters_.cancelled_loads;
  if (!slot.busy) counters_.wasted_bytes += slot.done_bytes;  // else finish() counts
  slot.ticket.store(0, std::memory_order_relaxed);
}

void Loader::load(int slot, const LoadRequest& request) {
  Slot& s = at(slot);
  if (request.file < 0 || request.file >= files_->size() || request.offset < 0 || request.nbytes < 1 ||
      request.nbytes > slot_bytes_) {
    throw std::invalid_argument("no such range, or larger than the slot's " + std::to_string(slot_bytes_) + " bytes");
  }
  std::lock_guard lock(mutex_);
  if (closing_) throw std::logic_error("the loader is closed");
  if (s.state.load(std::memory_order_relaxed) == static_cast<int>(SlotState::kLoading)) {
    throw std::logic_error("slot " + std::to_string(slot) + " is loading");
  }
  s.request = request;
  s.done_bytes = 0;
  s.crc32 = 0;
  s.demand.store(request.demand, std::memory_order_relaxed);
  s.ticket.store(++last_ticket_, std::memory_order_relaxed);
  set_state(s, SlotState::kLoading);
  if (!s.busy) enqueue(slot, false);  // else the thread that leaves the slot does
}

bool Loader::cancel(int slot) {
  Slot& s = at(slot);
  std::lock_guard lock(mutex_);
  const auto state = static_cast<SlotState>(s.state.load(std::memory_order_relaxed));
  if (state == SlotState::kReady) return false;
  if (state == SlotState::kLoading) {
    abandon(s);
    if (s.queued) dequeue(slot);
  }
  set_state(s, SlotState::kEmpty);
  return true;
}

void Loader::promote(int slot) {
  Slot& s = at(slot);
  std::lock_guard lock(mutex_);
  if (s.state.load(std::memory_order_relaxed) != static_cast<int>(SlotState::kLoading)) return;
  if (s.demand.load(std::memory_order_relaxed)) return;
  ++counters_.promoted_loads;
  const bool queued = s.queued;
  if (queued) dequeue(slot);
  s.demand.store(true, std::memory_order_relaxed);
  if (queued) enqueue(slot, false);
}

const std::uint8_t* Loader::wait_ready(int slot) {
  Slot& s = at(slot);
  constexpr int loading = static_cast<int>(SlotState::kLoading);
  int state = s.state.load(std::memory_order_acquire);
  if (state == loading) {
    const std::int64_t start_ns = now_ns();
    g_bell.ring_if_wanted();  // an idle thread that was asked to may have lost its core
    for (int i = 0; i < kSpins && state == loading; ++i) {
      relax();
      state = s.state.load(std::memory_order_acquire);
    }
    while (state == loading && now_ns() - start_ns < kYieldNs) {
      sched_yield();
      state = s.state.load(std::memory_order_acquire);
    }
    for (; state == loading; state = s.state.load(std::memory_order_acquire)) {
      s.state.wait(loading, std::memory_order_acquire);
    }
    waits_.fetch_add(1, std::memory_order_relaxed);
    wait_ns_.fetch_add(now_ns() - start_ns, std::memory_order_relaxed);
  }
  return state == static_cast<int>(SlotState::kReady) ? addresses_[slot] : nullptr;
}

bool Loader::is_ready(int slot) const { return state(slot) == SlotState::kReady; }

SlotState Loader::state(int slot) const {
  return static_cast<SlotState>(at(slot).state.load(std::memory_order_acquire));
}

LoadFailure Loader::failure(int slot) const {
  std::lock_guard lock(mutex_);
  return at(slot).failure;
}

LoaderCounters Loader::counters() const {
  std::lock_guard lock(mutex_);
  LoaderCounters out = counters_;
  out.read_bytes = read_bytes_.load(std::memory_order_relaxed);
  out.waits = waits_.load(std::memory_order_relaxed);
  out.wait_ns = wait_ns_.load(std::memory_order_relaxed);
  out.busy_ns = busy_ns_.load(std::memory_order_relaxed);
  return out;
}

void Loader::close() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    for (std::size_t i = 0; i < addresses_.size(); ++i) {
      Slot& s = slots_[i];
      if (s.state.load(std::memory_order_relaxed) != static_cast<int>(SlotState::kLoading)) continue;
      abandon(s);
      s.queued = false;
      set_state(s, SlotState::kEmpty);
    }
    demand_.clear();
    speculative_.clear();
    g_bell.ask();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  std::lock_guard lock(mutex_);
  want_core(false);
}

void Loader::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (!closing_ && demand_.empty() && speculative_.empty()) {
      if (++num_asleep_ == options_.num_threads) want_core(false);
      const std::uint32_t rings = g_bell.rings();
      lock.unlock();
      g_bell.sleep(rings);
      lock.lock();
      --num_asleep_;
    }
    if (closing_) return;
    Job job = take();
    lock.unlock();
    const JobEnd end = read_chunks(job);
    lock.lock();
    finish(job, end);
  }
}

Loader::Job Loader::take() {
  if (roused_ns_ != 0) {
    ++counters_.wakes;
    counters_.wake_ns += now_ns() - roused_ns_;
    roused_ns_ = 0;
  }
  const int slot = demand_.empty() ? speculative_.front() : demand_.front();
  dequeue(slot);
  Slot& s = slots_[slot];
  s.busy = true;
  return {slot, s.ticket.load(std::memory_order_relaxed), s.request, s.done_bytes, s.crc32, 0};
}

Loader::JobEnd Loader::read_chunks(Job& job) {
  Slot& s = slots_[job.slot];
  const LoadRequest& request = job.request;
  while (job.done_bytes < request.nbytes) {
    if (s.ticket.load(std::memory_order_relaxed) != job.ticket) return JobEnd::kStopped;
    const bool demand = s.demand.load(std::memory_order_relaxed);
    if (!demand && num_demand_queued_.load(std::memory_order_relaxed) > 0) return JobEnd::kStopped;
    const std::int64_t wanted = std::min(options_.chunk_bytes, request.nbytes - job.done_bytes);
    std::uint8_t* dest = addresses_[job.slot] + job.done_bytes;
    const std::int64_t start_ns = now_ns();
    const ReadResult result = files_->read(request.file, request.offset + job.done_bytes, wanted, dest);
    busy_ns_.fetch_add(now_ns() - start_ns, std::memory_order_relaxed);
    read_bytes_.fetch_add(result.got, std::memory_order_relaxed);
    if (options_.verify) job.crc32 = crc32(job.crc32, dest, static_cast<std::size_t>(result.got));
    job.done_bytes += result.got;
    job.error = result.error;
    if (result.got != wanted) return JobEnd::kFailed;
  }
  return options_.verify && job.crc32 != request.crc32 ? JobEnd::kFailed : JobEnd::kComplete;
}

// Behind mutex_. A load that was cancelled during its last chunk is abandoned even though its bytes are there.
void Loader::finish(const Job& job, JobEnd end) {
  Slot& s = slots_[job.slot];
  s.busy = false;
  if (s.ticket.load(std::memory_order_relaxed) != job.ticket) {
    counters_.wasted_bytes += job.done_bytes;
    if (s.state.load(std::memory_order_relaxed) == static_cast<int>(SlotState::kLoading)) enqueue(job.slot, false);
    return;
  }
  const LoadRequest& request = job.request;
  switch (end) {
    case JobEnd::kComplete:
      ++(s.demand.load(std::memory_order_relaxed) ? counters_.demand_loads : counters_.speculative_loads);
      set_state(s, SlotState::kReady);
      break;
    case JobEnd::kFailed:
      ++counters_.failed_loads;
      s.failure = {request.file, request.offset, request.nbytes, job.done_bytes, job.error, request.crc32, job.crc32,
                   request.layer, request.expert};
      set_state(s, SlotState::kFailed);
      break;
    case JobEnd::kStopped:  // by a demand load; the progress is kept
      ++counters_.overtaken_loads;
      s.done_bytes = job.done_bytes;
      s.crc32 = job.crc32;
      enqueue(job.slot, true);
      break;
  }
}

}  // namespace tidegate
