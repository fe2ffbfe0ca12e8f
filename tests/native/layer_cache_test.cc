// The native cache of a layer over a loader: visits, wrong and right prefetches, refuted ones that are still loading, failed reads.
// Every expert's bytes are checked when it is used. Meant for ThreadSanitizer and AddressSanitizer.
#include "layer_cache.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "faulty_reader.h"
#include "testing.h"

namespace {

using namespace tidegate;

constexpr int kExperts = 24, kSlots = 9, kNeeded = 4, kLayers = 2, kSteps = 3000;
constexpr std::int64_t kBlobBytes = 2 * 4096;

// Blob i is full of bytes i + 1.
struct BlobFile {
  std::string path = "/tmp/tidegate-layer-cache-test-" + std::to_string(::getpid());
  BlobFile() {
    std::FILE* file = std::fopen(path.c_str(), "wb");
    check(file != nullptr, "temporary file");
    for (int i = 0; i < kLayers * kExperts; ++i) {
      const std::vector<std::uint8_t> blob(kBlobBytes, static_cast<std::uint8_t>(i + 1));
      check(std::fwrite(blob.data(), 1, blob.size(), file) == blob.size(), "write");
    }
    std::fclose(file);
  }
  ~BlobFile() { ::unlink(path.c_str()); }
};

struct Model {
  BlobFile file;
  std::unique_ptr<std::uint8_t, decltype(&std::free)> memory{
      static_cast<std::uint8_t*>(std::aligned_alloc(4096, kLayers * kExperts * kBlobBytes)), &std::free};
  std::unique_ptr<Loader> loader;
  std::unique_ptr<ExpertLoads> loads;
  CacheCounts counts;
  RankCounts ranks{kLayers, kExperts, 4};
  std::vector<std::unique_ptr<LayerBook>> books;
  std::vector<std::unique_ptr<Uses>> uses;
  std::vector<std::unique_ptr<LayerCache>> caches;

  // With a slot for every expert none is ever evicted, and nobody counts their uses.
  Model(const Faults& faults, Worth worth, int num_slots) {
    std::vector<std::uint8_t*> slots;
    for (int i = 0; i < kLayers * num_slots; ++i) slots.push_back(memory.get() + i * kBlobBytes);
    auto files = std::make_shared<FileSet>(std::vector<std::string>{file.path}, std::make_shared<FaultyReader>(faults), false);
    loader = std::make_unique<Loader>(files, slots, kBlobBytes, LoaderOptions{2, 4096, false});
    loads = std::make_unique<ExpertLoads>(*loader);
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<LoadRequest> experts;
      for (int e = 0; e < kExperts; ++e)
        experts.push_back({0, (layer * kExperts + e) * kBlobBytes, kBlobBytes, 0, true, layer, e});
      loads->add_layer(experts);
      books.push_back(std::make_unique<LayerBook>(kExperts, layer * num_slots, num_slots));
      uses.push_back(std::make_unique<Uses>(worth, kExperts, 16.0));
      const double always_used = worth == Worth::decayed_uses ? 23.0 : 1e300;
      caches.push_back(std::make_unique<LayerCache>(LayerCache::Parts{layer, books.back().get(), loads.get(), &counts,
                                                                      num_slots < kExperts ? uses.back().get() : nullptr,
                                                                      num_slots < kExperts ? &ranks : nullptr, always_used}));
    }
  }

  // False if a load has failed.
  bool use(int layer, const std::vector<int>& needed) {
    for (const int expert : needed) {
      const std::uint8_t* const bytes = loader->wait_ready(books[static_cast<std::size_t>(layer)]->slot_of(expert));
      if (bytes == nullptr) return false;
      const auto wanted = static_cast<std::uint8_t>(layer * kExperts + expert + 1);
      check(std::all_of(bytes, bytes + kBlobBytes, [wanted](std::uint8_t b) { return b == wanted; }), "the expert's own bytes");
    }
    return true;
  }

  bool has_failed_slot() const {
    for (int slot = 0; slot < kLayers * books[0]->capacity(); ++slot)
      if (loader->state(slot) == SlotState::kFailed) return true;
    return false;
  }
};

void steps(Worth worth, std::int64_t fail_at, int num_slots = kSlots) {
  const bool evicts = num_slots < kExperts;
  Model model({.seed = 3, .max_delay_us = 30, .fail_at = fail_at}, worth, num_slots);
  Random random{static_cast<std::uint64_t>(worth) + 1};
  std::int64_t used = 0, failed = 0;
  std::vector<int> next[kLayers];
  for (int step = 0; step < kSteps; ++step)
    for (int layer = 0; layer < kLayers; ++layer) {
      LayerCache& cache = *model.caches[static_cast<std::size_t>(layer)];
      std::vector<int> needed = next[layer];
      while (static_cast<int>(needed.size()) < kNeeded) {
        const int expert = random.below(3) == 0 ? random.below(kExperts) : random.below(kSlots);
        if (std::find(needed.begin(), needed.end(), expert) == needed.end()) needed.push_back(expert);
      }
      std::sort(needed.begin(), needed.end());
      check(cache.serves(needed, 1) && cache.serves(needed, 17) != evicts, "steps of few tokens are served");
      cache.visit(needed);
      cache.cancel_refuted();
      // Half of the guesses at the next layer are right.
      const int there = (layer + 1) % kLayers;
      next[there] = {random.below(kExperts)};
      for (const int guess : {next[there][0], random.below(kExperts)})
        model.caches[static_cast<std::size_t>(there)]->prefetch(guess, 0.7, next[there].data(), 1);
      used += kNeeded;
      const bool is_whole = model.use(layer, needed);
      failed += !is_whole;
      cache.leave(needed);
      check(is_whole || model.has_failed_slot(), "why a load failed can still be told");
      const LayerBook& book = cache.book();
      check(book.num_pinned() == 0 && book.capacity() == num_slots, "no pin and no slot is lost");
      for (const int expert : needed) check(!is_whole || (book.is_here(expert) && !book.is_unused(expert)), "what was used is here");
    }
  const CacheCounts& c = model.counts;
  check(c.demand_hits + c.prefetch_hits + c.misses == used, "every use is counted once");
  check(c.prefetch_issued >= c.prefetch_hits + c.prefetch_wasted && c.prefetch_hits > 0, "prefetches");
  check((c.prefetch_wasted > 0 && c.evictions > 0) || !evicts, "evictions");
  check(c.evictions == 0 || evicts, "a slot for every expert");
  check((failed > 0) == (fail_at >= 0), "failed reads");
  model.loader->close();
}

}  // namespace

int main() {
  for (const Worth worth : {Worth::decayed_uses, Worth::last_use, Worth::uses, Worth::uses_over_age}) steps(worth, -1);
  steps(Worth::decayed_uses, 100);
  for (const int fail_at : {-1, 5}) steps(Worth::uses, fail_at, kExperts);
  std::puts("layer cache: ok");
  return 0;
}
