// What every operation runs on: threads, memory for results, and the instruction set. Operations are free functions
// that take a Compute first and allocate their result from its workspace. One thread at a time calls operations of a Compute; the
// same holds for whatever else the core has whose header does not say otherwise.
#pragma once
#include "dispatch.h"
#include "pool.h"
#include "workspace.h"

namespace tidegate {

struct Compute {
  Compute(int threads, std::uint8_t* memory, std::size_t bytes, Isa isa)
      : pool(threads), workspace(memory, bytes), isa(isa) {}
  Pool pool;
  Workspace workspace;
  const Isa isa;
};

}  // namespace tidegate
