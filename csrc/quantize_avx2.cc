#if defined(__x86_64__)
#include "quantize_impl.h"

namespace tidegate {

extern const Quantizer quantizer_avx2;
const Quantizer quantizer_avx2 = {quantize_group, row_scale};

}  // namespace tidegate
#endif
