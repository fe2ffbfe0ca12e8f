#if defined(__x86_64__)
#include "quantize_impl.h"

namespace tidegate {

extern const QuantizeGroupFn quantize_group_avx2 = quantize_group<1>;

}  // namespace tidegate
#endif
