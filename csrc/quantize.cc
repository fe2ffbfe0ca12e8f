#include "quantize.h"

namespace tidegate {

extern const Quantizer quantizer_portable;
#if defined(__x86_64__)
extern const Quantizer quantizer_avx2;
#endif

const Quantizer& quantizer(Isa isa) {
#if defined(__x86_64__)
  if (isa != Isa::portable) return quantizer_avx2;
#endif
  (void)isa;
  return quantizer_portable;
}

}  // namespace tidegate
