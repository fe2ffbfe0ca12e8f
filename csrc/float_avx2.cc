#if defined(__AVX2__)
#include "attention_kernels.h"
#include "row_kernels.h"

namespace tidegate {

extern const FloatKernels float_avx2;
const FloatKernels float_avx2 = {rms_norm, layer_norm, rotate, to_half, attend_block, merge, finish, dots};

}  // namespace tidegate
#endif
