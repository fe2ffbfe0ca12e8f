#include "dispatch.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tidegate {
namespace {

// Whether this build and this processor have the matrix unit, and the system lets this process use it.
bool ask_for_matrix_unit() {
#if defined(TIDEGATE_EMULATE_MATRIX_UNIT)
  return true;
#elif defined(TIDEGATE_MATRIX_UNIT) && defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kInt8) == 0) return false;
  // Linux hands out the unit's 8 KB of state on request only (Documentation/arch/x86/xstate.rst); without the request
  // its first instruction ends the process. The permission holds for all threads.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_matrix_unit() {
  static const bool has = ask_for_matrix_unit();
  return has;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::amx: return "amx";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::portable: break;
  }
  return "portable";
}

std::optional<Isa> parse_isa(std::string_view name) {
  for (Isa isa : {Isa::amx, Isa::avx512, Isa::avx2, Isa::portable})
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
  if (avx512 && has_matrix_unit()) found.push_back(Isa::amx);
  if (avx512) found.push_back(Isa::avx512);
  if (avx2) found.push_back(Isa::avx2);
#endif
  found.push_back(Isa::portable);
  return found;
}

}  // namespace tidegate
