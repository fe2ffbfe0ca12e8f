// The loader under load: demand and speculative loads, cancellations, promotions, several waiters a slot, faults, and
// closing in the middle. Every byte is checked when it is used. Meant for ThreadSanitizer and AddressSanitizer.
#include "loader.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "crc32.h"
#include "faulty_reader.h"
#include "pool.h"
#include "testing.h"

namespace {

using tidegate::FaultyReader;
using tidegate::Loader;
using tidegate::LoadRequest;
using tidegate::SlotState;

constexpr int kBlobs = 24, kSlots = 6, kWaiters = 3;
constexpr std::int64_t kBlobBytes = 3 * 4096;

// A file of random blobs, removed at the end.
struct BlobFile {
  std::string path = "/tmp/tidegate-loader-test-" + std::to_string(::getpid());
  std::vector<std::uint32_t> crcs;

  BlobFile() {
    Random random{7};
    std::FILE* file = std::fopen(path.c_str(), "wb");
    check(file != nullptr, "temporary file");
    std::vector<std::uint8_t> blob(kBlobBytes);
    for (int i = 0; i < kBlobs; ++i) {
      for (auto& byte : blob) byte = static_cast<std::uint8_t>(random.below(256));
      crcs.push_back(tidegate::crc32(0, blob.data(), blob.size()));
      check(std::fwrite(blob.data(), 1, blob.size(), file) == blob.size(), "write");
    }
    std::fclose(file);
  }
  ~BlobFile() { ::unlink(path.c_str()); }
  LoadRequest request(int blob, bool demand) const { return {0, blob * kBlobBytes, kBlobBytes, crcs[blob], demand}; }
};

struct Slots {
  std::unique_ptr<std::uint8_t, decltype(&std::free)> memory{
      static_cast<std::uint8_t*>(std::aligned_alloc(4096, kSlots * kBlobBytes)), &std::free};
  std::vector<std::uint8_t*> addresses;
  Slots() {
    for (int i = 0; i < kSlots; ++i) addresses.push_back(memory.get() + i * kBlobBytes);
  }
};

// All waiters of a step look at the same slots at the same time, as the threads of one MoE call do.
void compute(Loader& loader, const BlobFile& file, const std::vector<int>& slots, const std::vector<int>& blobs) {
  std::vector<std::thread> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&] {
      for (std::size_t j = 0; j < slots.size(); ++j) {
        const std::uint8_t* bytes = loader.wait_ready(slots[j]);
        check(bytes != nullptr, "a load without faults succeeds");
        check(tidegate::crc32(0, bytes, kBlobBytes) == file.crcs[blobs[j]], "right bytes at the moment of compute");
      }
    });
  }
  for (std::thread& waiter : waiters) waiter.join();
}

void steps_with_wrong_guesses(int num_threads, int num_steps) {
  BlobFile file;
  Slots memory;
  auto reader = std::make_shared<FaultyReader>(tidegate::Faults{.seed = 5, .max_delay_us = 40});
  auto files = std::make_shared<tidegate::FileSet>(std::vector<std::string>{file.path}, reader, false);
  Loader loader(files, memory.addresses, kBlobBytes, {num_threads, 4096, true});
  Random random{static_cast<std::uint64_t>(num_threads)};
  std::vector<int> holds(kSlots, -1);
  for (int step = 0; step < num_steps; ++step) {
    std::vector<int> slots, blobs;
    for (int slot = 0; slot < kSlots; ++slot) {
      const int blob = random.below(kBlobs);
      const bool wanted = slot % 2 == step % 2;
      if (wanted && holds[slot] == blob && loader.state(slot) == SlotState::kLoading) {
        loader.promote(slot);
      } else if (wanted || random.below(2) == 0) {
        if (!loader.is_ready(slot)) loader.cancel(slot);
        loader.load(slot, file.request(blob, wanted));
        holds[slot] = blob;
      }
      if (wanted) slots.push_back(slot), blobs.push_back(blob);
    }
    compute(loader, file, slots, blobs);
  }
  const auto counters = loader.counters();
  check(counters.failed_loads == 0, "no load fails");
  check(counters.cancelled_loads > 0 || num_threads > 1, "some loads are cancelled");  // many threads may be done too soon
  check(counters.wakes > 0 && counters.wake_ns > 0, "threads sleep between loads");
  for (int slot = 0; slot < kSlots; ++slot) {
    if (!loader.is_ready(slot)) loader.cancel(slot);
    loader.load(slot, file.request(slot, false));
  }
  loader.close();  // with loads in flight
  check(tidegate::g_cores_wanted.load() == 0, "nobody reads any more");
  for (int slot = 0; slot < kSlots; ++slot) check(loader.state(slot) != SlotState::kLoading, "closed");
}

void asks_for_a_core_only_while_there_are_loads() {
  BlobFile file;
  Slots memory;
  auto reader = std::make_shared<FaultyReader>(tidegate::Faults{});
  auto files = std::make_shared<tidegate::FileSet>(std::vector<std::string>{file.path}, reader, false);
  Loader loader(files, memory.addresses, kBlobBytes, {2, 4096, false});
  for (int round = 0; round < 200; ++round) {
    loader.load(0, file.request(round % kBlobs, round % 2 == 0));
    if (round % 3 == 0) loader.cancel(0);  // often before anybody woke up for it
    else loader.wait_ready(0);
    for (int i = 0; i < 1'000'000 && tidegate::g_cores_wanted.load() != 0; ++i) std::this_thread::yield();
    check(tidegate::g_cores_wanted.load() == 0, "asleep, no core is wanted");
  }
}

void failures_reach_every_waiter() {
  BlobFile file;
  Slots memory;
  auto reader = std::make_shared<FaultyReader>(tidegate::Faults{.max_delay_us = 200, .fail_at = 2});
  auto files = std::make_shared<tidegate::FileSet>(std::vector<std::string>{file.path}, reader, false);
  Loader loader(files, memory.addresses, kBlobBytes, {1, 4096, false});
  loader.load(0, file.request(3, true));
  std::atomic<int> told{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < kWaiters; ++i) waiters.emplace_back([&] { told += loader.wait_ready(0) == nullptr; });
  for (std::thread& waiter : waiters) waiter.join();
  check(told == kWaiters && loader.failure(0).got_bytes == 2 * 4096, "failure is seen by all");
}

}  // namespace

int main() {
  for (int num_threads : {1, 2, 8}) steps_with_wrong_guesses(num_threads, 400);
  asks_for_a_core_only_while_there_are_loads();
  failures_reach_every_waiter();
  std::puts("loader: ok");
}
