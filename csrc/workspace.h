// A bump allocator over memory that somebody else owns. Operations allocate their outputs and scratch here, so the
// activation memory of a step is one accounted block and its peak is known.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "tensor.h"

namespace tidegate {

// An allocation that does not fit. Nothing was allocated.
struct WorkspaceFull : std::runtime_error {
  WorkspaceFull(std::size_t asked, std::size_t free)
      : std::runtime_error("workspace is full"), asked_bytes(asked), free_bytes(free) {}
  std::size_t asked_bytes, free_bytes;
};

class Workspace {
 public:
  static constexpr std::size_t kAlignment = 64;

  // `memory` must be 64-byte aligned and outlive the workspace.
  Workspace(std::uint8_t* memory, std::size_t bytes);

  // 64-byte aligned, uninitialised. Throws WorkspaceFull.
  void* allocate(std::size_t bytes);
  template <class T>
  T* array(std::int64_t count) {
    return static_cast<T*>(allocate(static_cast<std::size_t>(count) * sizeof(T)));
  }
  Matrix matrix(std::int64_t rows, std::int64_t cols) { return {array<float>(rows * cols), rows, cols}; }

  // Everything allocated after mark() is freed by release() of its value; 0 frees all. Throws on a mark above the level.
  std::size_t mark() const { return level_; }
  void release(std::size_t mark);

  std::size_t capacity_bytes() const { return bytes_; }
  std::size_t peak_bytes() const { return peak_; }

 private:
  std::uint8_t* memory_;
  std::size_t bytes_, level_ = 0, peak_ = 0;
};

// Scratch of one operation: frees what was allocated since, at the end of the scope.
class Scratch {
 public:
  explicit Scratch(Workspace& workspace) : workspace_(workspace), mark_(workspace.mark()) {}
  ~Scratch() { workspace_.release(mark_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  Workspace& workspace_;
  std::size_t mark_;
};

}  // namespace tidegate
