// How compute waits for an expert that may still be loading. Implemented by the loader, used by MoeStep.
#pragma once
#include <cstdint>

namespace tidegate {

class SlotSource {
 public:
  virtual ~SlotSource() = default;
  // Blocks until the slot is ready and returns its first byte; nullptr if its load failed (details stay in the source).
  // Called from the thread that runs the step; spins briefly, then sleeps.
  virtual const std::uint8_t* wait_ready(int slot) = 0;
  // True if wait_ready would not block.
  virtual bool is_ready(int slot) const = 0;
};

}  // namespace tidegate
