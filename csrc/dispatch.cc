#include "dispatch.h"

namespace tidegate {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::portable: break;
  }
  return "portable";
}

std::optional<Isa> parse_isa(std::string_view name) {
  for (Isa isa : {Isa::avx512, Isa::avx2, Isa::portable})
    if (name == isa_name(isa)) return isa;
  return std::nullopt;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx512) found.push_back(Isa::avx512);
  if (avx2) found.push_back(Isa::avx2);
#endif
  found.push_back(Isa::portable);
  return found;
}

}  // namespace tidegate
