// Where the experts of one layer are, for native code. Kept by experts/cache.py, which decides it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tidegate {

// Throws std::out_of_range for an expert that is none.
class LayerBook {
 public:
  explicit LayerBook(int num_experts) : slots_(static_cast<std::size_t>(num_experts), -1), unused_(slots_.size()) {}

  int num_experts() const { return static_cast<int>(slots_.size()); }
  // The expert has a slot from now on, its load may still be under way; `is_unused`: nobody has needed it yet.
  void insert(int expert, int slot, bool is_unused) {
    slots_.at(static_cast<std::size_t>(expert)) = slot;
    unused_[static_cast<std::size_t>(expert)] = is_unused;
  }
  void use(int expert) { unused_.at(static_cast<std::size_t>(expert)) = false; }
  void drop(int expert) { insert(expert, -1, false); }

  bool is_here(int expert) const { return slot_of(expert) >= 0; }
  bool is_unused(int expert) const { return unused_.at(static_cast<std::size_t>(expert)); }
  // -1: none.
  int slot_of(int expert) const { return slots_.at(static_cast<std::size_t>(expert)); }

 private:
  std::vector<std::int32_t> slots_;
  std::vector<std::uint8_t> unused_;
};

}  // namespace tidegate
