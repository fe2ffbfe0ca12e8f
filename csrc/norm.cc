#include "norm.h"

#include <stdexcept>

namespace tidegate {

void norm_row(const FloatKernels& kernels, const NormWeights& norm, const float* x, float* y) {
  if (norm.bias != nullptr)
    kernels.layer_norm(x, norm.weight, norm.bias, norm.eps, y, norm.width);
  else
    kernels.rms_norm(x, norm.weight, norm.eps, y, norm.width);
}

Matrix norm(Compute& compute, const Matrix& x, const NormWeights& norm) {
  if (x.cols != norm.width) throw std::invalid_argument("norm: rows have another width than the weights");
  const FloatKernels& kernels = float_kernels(compute.isa);
  const Matrix out = compute.workspace.matrix(x.rows, x.cols);
  compute.pool.parallel_for(x.rows, 16, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) norm_row(kernels, norm, x.row(t), out.row(t));
  });
  return out;
}

}  // namespace tidegate
