#include "layer_book.h"

#include <algorithm>
#include <stdexcept>

namespace tidegate {

LayerBook::LayerBook(int num_experts, int first_slot, int capacity)
    : slots_(static_cast<std::size_t>(num_experts), -1), unused_(slots_.size()), pinned_(slots_.size()) {
  for (int i = capacity; i-- > 0;) free_.push_back(first_slot + i);
}

std::vector<int> LayerBook::residents() const {
  std::vector<int> out;
  for (int e = 0; e < num_experts(); ++e)
    if (is_here(e)) out.push_back(e);
  return out;
}

std::vector<int> LayerBook::pinned() const {
  std::vector<int> out;
  for (int e = 0; e < num_experts() && num_pinned_ > 0; ++e)
    if (is_pinned(e)) out.push_back(e);
  return out;
}

int LayerBook::insert(int expert, bool is_unused) {
  if (is_here(expert) || free_.empty()) throw std::logic_error("the expert has a slot, or there is none");
  const auto e = static_cast<std::size_t>(expert);
  slots_[e] = give_slot();
  unused_[e] = is_unused;
  if (is_unused) pending_.push_back(expert);
  ++num_resident_;
  return slots_[e];
}

void LayerBook::drop(int expert) {
  if (!is_here(expert)) throw std::logic_error("the expert has no slot");
  const auto e = static_cast<std::size_t>(expert);
  free_.push_back(slots_[e]);
  slots_[e] = -1;
  unused_[e] = false;
  --num_resident_;
}

int LayerBook::give_slot() {
  const int slot = free_.back();
  free_.pop_back();
  return slot;
}

std::vector<int> LayerBook::take_pending() {
  std::vector<int> out;
  for (const int expert : pending_)
    if (is_unused(expert)) out.push_back(expert);
  pending_.clear();
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void LayerBook::set_pinned(int expert, bool is_pinned) {
  std::uint8_t& mark = pinned_.at(static_cast<std::size_t>(expert));
  num_pinned_ += static_cast<int>(is_pinned) - static_cast<int>(mark);
  mark = is_pinned;
}

}  // namespace tidegate
