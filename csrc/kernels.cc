#include "kernels.h"

namespace tidegate {

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_amx;
#endif

const Kernels& kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::amx) return kernels_amx;
  if (isa == Isa::avx512) return kernels_avx512;
  if (isa == Isa::avx2) return kernels_avx2;
#endif
  (void)isa;
  return kernels_portable;
}

void multiply_tile(const Kernels& table, const WeightFormat& format, const TileJob& job, int panels) {
  if (panels <= table.tile_panels) return table.tile_fn(format, job.tile.tokens, panels)(job);
  const auto multiply_panel = table.tile_fn(format, job.tile.tokens, 1);
  multiply_panel(job);
  TileJob second = job;
  second.panels[0] = job.panels[1];
  multiply_panel(second);
}

}  // namespace tidegate
