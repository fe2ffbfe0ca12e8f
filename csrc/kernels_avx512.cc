#if defined(__x86_64__)
#include "activation_impl.h"
#include "prepare_impl.h"
#include "simd_avx512.h"
#include "tile_impl.h"

namespace tidegate {

extern const Kernels kernels_avx512 = {tile_shape<Avx512>, Avx512::kTilePanels, find_tile_fn<Avx512>,
                                       prepare<Avx512>, activate<Avx512>, weighted_sum<Avx512>};

}  // namespace tidegate
#endif
