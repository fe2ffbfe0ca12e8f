#include "attention_kernels.h"
#include "row_kernels.h"

namespace tidegate {

extern const FloatKernels float_portable;
const FloatKernels float_portable = {rms_norm, layer_norm, rotate, to_half, attend_block, merge, finish, dots};

}  // namespace tidegate
