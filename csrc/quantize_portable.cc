#include "quantize_impl.h"

namespace tidegate {

extern const QuantizeGroupFn quantize_group_portable = quantize_group<0>;

}  // namespace tidegate
