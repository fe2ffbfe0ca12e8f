#include "float_kernels.h"

namespace tidegate {

extern const FloatKernels float_portable;
#if defined(__x86_64__)
extern const FloatKernels float_avx2, float_avx512;
#endif

const FloatKernels& float_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512 || isa == Isa::amx) return float_avx512;
  if (isa == Isa::avx2) return float_avx2;
#else
  static_cast<void>(isa);
#endif
  return float_portable;
}

}  // namespace tidegate
