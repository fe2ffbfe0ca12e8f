#include "quantize_impl.h"

namespace tidegate {

extern const Quantizer quantizer_portable;
const Quantizer quantizer_portable = {quantize_group, row_scale};

}  // namespace tidegate
