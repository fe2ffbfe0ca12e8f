// What decode steps do with the slots of a layer, natively: the twin of src/tidegate/experts/cache.py.
#pragma once
#include <cstdint>
#include <vector>

#include "layer_book.h"
#include "loader.h"
#include "rank_counts.h"
#include "uses.h"

namespace tidegate {

// CacheCounters of experts/base.py, and the time that cache and guesses took.
struct CacheCounts {
  std::int64_t demand_hits = 0, prefetch_hits = 0, misses = 0, evictions = 0, prefetch_issued = 0, prefetch_wasted = 0,
               prefetch_dropped = 0, prefetch_late = 0;
  std::int64_t visit_ns = 0, guess_ns = 0;
};

// Where every expert is in the store's files, and who reads it from there.
class ExpertLoads {
 public:
  explicit ExpertLoads(Loader& loader) : loader(loader) {}
  // The next layer's experts; `demand` of the requests means nothing.
  void add_layer(std::vector<LoadRequest> experts) { experts_.push_back(std::move(experts)); }
  int num_layers() const { return static_cast<int>(experts_.size()); }
  void load(int layer, int expert, int slot, bool demand);

  Loader& loader;

 private:
  std::vector<std::vector<LoadRequest>> experts_;
};

// Steps that need no more experts of a layer than it has slots. All is borrowed, and used by one thread.
class LayerCache {
 public:
  struct Parts {
    int layer = 0;
    LayerBook* book = nullptr;
    ExpertLoads* loads = nullptr;
    CacheCounts* counts = nullptr;
    Uses* uses = nullptr;  // of the policy; null where every expert has a slot, so that none is ever evicted
    RankCounts* ranks = nullptr;  // null where slots stay where they are
    double always_used = 0.0;     // the policy's value of an expert that every step needs
  };
  // Throws std::invalid_argument if there are fewer slots than experts, and no uses.
  explicit LayerCache(const Parts& parts);

  const LayerBook& book() const { return *p_.book; }
  CacheCounts& counts() const { return *p_.counts; }
  SlotSource& source() const { return p_.loads->loader; }
  // Whether `visit` may be called: it decides as ExpertCache does, for steps of `num_rows` tokens.
  bool serves(const std::vector<int>& needed, std::int64_t num_rows) const;
  // `needed`, ascending, have slots and are pinned from now on, and those that are missing are on their way.
  void visit(const std::vector<int>& needed);
  // No longer pinned; those that did not arrive, because a load has failed, are forgotten.
  void leave(const std::vector<int>& needed);
  // Starts a speculative load of an expert that is needed with these odds; false, and counted as dropped, if it would evict
  // one that is worth more, or one of `keep`.
  bool prefetch(int expert, double odds, const std::int32_t* keep, int num_keep);
  // After the router has spoken: stops speculative loads that it did not ask for and that are not done.
  void cancel_refuted();

 private:
  void insert(int expert, bool demand);
  void evict(int expert);
  void drop(int expert);

  const Parts p_;
};

}  // namespace tidegate
