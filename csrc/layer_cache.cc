#include "layer_cache.h"

#include <algorithm>
#include <stdexcept>

namespace tidegate {
namespace {

// A step of more tokens is a prompt as a rule; experts/cache.py counts its latest ones one by one.
constexpr std::int64_t kPromptTokens = 16;

}  // namespace

void ExpertLoads::load(int layer, int expert, int slot, bool demand) {
  LoadRequest request = experts_.at(static_cast<std::size_t>(layer)).at(static_cast<std::size_t>(expert));
  request.demand = demand;
  loader.load(slot, request);
}

LayerCache::LayerCache(const Parts& parts) : p_(parts) {
  if (p_.uses == nullptr && p_.book->capacity() < p_.book->num_experts())
    throw std::invalid_argument("a cache that evicts experts wants to know their uses");
}

bool LayerCache::serves(const std::vector<int>& needed, std::int64_t num_rows) const {
  const bool counts_as_one = p_.uses == nullptr || num_rows <= kPromptTokens;
  return counts_as_one && static_cast<int>(needed.size()) <= p_.book->capacity() && p_.book->num_pinned() == 0;
}

void LayerCache::visit(const std::vector<int>& needed) {
  LayerBook& book = *p_.book;
  CacheCounts& counts = *p_.counts;
  if (p_.ranks != nullptr && p_.ranks->wants(p_.layer)) p_.ranks->observe(p_.layer, p_.uses->ranks(needed));
  if (p_.uses != nullptr) p_.uses->use(needed);
  for (const int expert : needed) {
    const int slot = book.slot_of(expert);
    if (slot < 0) continue;
    book.pin(expert);
    if (!book.is_unused(expert)) {
      ++counts.demand_hits;
      continue;
    }
    ++counts.prefetch_hits;
    book.use(expert);
    if (source().is_ready(slot)) continue;
    p_.loads->loader.promote(slot);
    ++counts.prefetch_late;
  }
  for (const int expert : needed) {
    if (book.is_here(expert)) continue;
    ++counts.misses;
    if (book.num_free() == 0) evict(p_.uses->lowest_unless([&](int e) { return book.is_pinned(e); }));
    insert(expert, true);
    book.pin(expert);
  }
}

void LayerCache::leave(const std::vector<int>& needed) {
  for (const int expert : needed) {
    p_.book->unpin(expert);
    const int slot = p_.book->slot_of(expert);
    if (slot < 0 || source().is_ready(slot)) continue;
    if (p_.loads->loader.state(slot) == SlotState::kLoading) p_.loads->loader.cancel(slot);  // a failure is still to be told
    drop(expert);
  }
}

bool LayerCache::prefetch(int expert, double odds, const std::int32_t* keep, int num_keep) {
  LayerBook& book = *p_.book;
  if (book.is_here(expert)) return false;
  if (book.num_free() == 0) {
    const auto is_kept = [&](int e) { return book.is_pinned(e) || std::find(keep, keep + num_keep, e) != keep + num_keep; };
    const int victim = p_.uses->lowest_unless(is_kept);
    if (victim < 0 || p_.uses->value(victim) >= odds * p_.always_used) {
      ++p_.counts->prefetch_dropped;
      return false;
    }
    evict(victim);
  }
  insert(expert, false);
  ++p_.counts->prefetch_issued;
  return true;
}

void LayerCache::cancel_refuted() {
  if (!p_.book->has_pending()) return;
  for (const int expert : p_.book->take_pending()) {
    const int slot = p_.book->slot_of(expert);
    if (source().is_ready(slot) || !p_.loads->loader.cancel(slot)) continue;
    ++p_.counts->prefetch_wasted;
    drop(expert);
  }
}

void LayerCache::insert(int expert, bool demand) {
  const int slot = p_.book->insert(expert, !demand);
  if (p_.uses != nullptr) p_.uses->set_resident(expert, true);
  p_.loads->load(p_.layer, expert, slot, demand);
}

void LayerCache::evict(int expert) {
  if (expert < 0) throw std::logic_error("more is pinned than the layer has slots");
  const int slot = p_.book->slot_of(expert);
  if (!source().is_ready(slot)) p_.loads->loader.cancel(slot);
  if (p_.book->is_unused(expert)) ++p_.counts->prefetch_wasted;
  ++p_.counts->evictions;
  drop(expert);
}

void LayerCache::drop(int expert) {
  p_.book->drop(expert);
  if (p_.uses != nullptr) p_.uses->set_resident(expert, false);
}

}  // namespace tidegate
