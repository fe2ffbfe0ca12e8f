// RMSNorm and LayerNorm of rows.
#pragma once
#include <cstdint>

#include "compute.h"
#include "float_kernels.h"
#include "tensor.h"

namespace tidegate {

// RMSNorm, or LayerNorm if there is a bias. Pointers are borrowed.
struct NormWeights {
  const float* weight = nullptr;  // [width]
  const float* bias = nullptr;    // [width] or null
  float eps = 0.0f;
  std::int64_t width = 0;
};

// One row of norm.width numbers; y may be x.
void norm_row(const FloatKernels& kernels, const NormWeights& norm, const float* x, float* y);
// [T, width] -> [T, width]. Throws std::invalid_argument on rows of another width.
Matrix norm(Compute& compute, const Matrix& x, const NormWeights& norm);

}  // namespace tidegate
