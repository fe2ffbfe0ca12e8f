// A float32 matrix that somebody else owns. Made and checked once; passed by reference on the hot path.
#pragma once
#include <cstdint>

namespace tidegate {

struct Matrix {
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  float* row(std::int64_t r) const { return data + r * cols; }
};

}  // namespace tidegate
