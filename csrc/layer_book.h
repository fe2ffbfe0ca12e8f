// The slots of one layer.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tidegate {

// Which expert is in which slot. Decides nothing. Throws std::out_of_range for an expert that is none.
class LayerBook {
 public:
  // Slots first_slot ... first_slot + capacity - 1, all free.
  LayerBook(int num_experts, int first_slot, int capacity);

  int num_experts() const { return static_cast<int>(slots_.size()); }
  int num_free() const { return static_cast<int>(free_.size()); }
  int num_pinned() const { return num_pinned_; }
  int capacity() const { return num_resident_ + num_free(); }
  int slot_of(int expert) const { return slots_.at(static_cast<std::size_t>(expert)); }  // -1: none
  bool is_here(int expert) const { return slot_of(expert) >= 0; }
  bool is_unused(int expert) const { return unused_.at(static_cast<std::size_t>(expert)); }
  bool is_pinned(int expert) const { return pinned_.at(static_cast<std::size_t>(expert)); }
  std::vector<int> residents() const;
  std::vector<int> pinned() const;

  // The expert gets a free slot, its load may be under way; `is_unused`: nobody has needed it yet. Returns the slot.
  int insert(int expert, bool is_unused);
  void use(int expert) { unused_.at(static_cast<std::size_t>(expert)) = false; }
  void pin(int expert) { set_pinned(expert, true); }
  void unpin(int expert) { set_pinned(expert, false); }
  void drop(int expert);
  // A free slot goes to another layer, or comes from one.
  int give_slot();
  void take_slot(int slot) { free_.push_back(slot); }

  // Experts of speculative loads that nobody has needed yet, ascending, since the last call: these may not be done.
  std::vector<int> take_pending();
  bool has_pending() const { return !pending_.empty(); }

 private:
  void set_pinned(int expert, bool is_pinned);

  std::vector<std::int32_t> slots_;
  std::vector<std::uint8_t> unused_, pinned_;
  std::vector<int> free_, pending_;
  int num_pinned_ = 0, num_resident_ = 0;
};

}  // namespace tidegate
