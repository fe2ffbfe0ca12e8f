#include "workspace.h"

#include <algorithm>

namespace tidegate {

Workspace::Workspace(std::uint8_t* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {
  if (reinterpret_cast<std::uintptr_t>(memory) % kAlignment != 0)
    throw std::invalid_argument("workspace memory must be 64-byte aligned");
}

void* Workspace::allocate(std::size_t bytes) {
  if (bytes > bytes_ - level_) throw WorkspaceFull(bytes, bytes_ - level_);
  void* const result = memory_ + level_;
  level_ = std::min(bytes_, (level_ + bytes + kAlignment - 1) / kAlignment * kAlignment);
  peak_ = std::max(peak_, level_);
  return result;
}

void Workspace::release(std::size_t mark) {
  if (mark > level_) throw std::invalid_argument("workspace mark is above the current level");
  level_ = mark;
}

}  // namespace tidegate
