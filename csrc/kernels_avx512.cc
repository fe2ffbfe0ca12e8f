#if defined(__x86_64__)
#include "activation_impl.h"
#include "prepare_impl.h"
#include "tile_impl.h"

namespace tidegate {

extern const Kernels kernels_avx512 = {tile_shape, kTilePanels, find_tile_fn, prepare, activate, weighted_sum};

}  // namespace tidegate
#endif
