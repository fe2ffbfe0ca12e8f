#if defined(__x86_64__)
#include "activation_impl.h"
#include "prepare_impl.h"
#include "simd_avx2.h"
#include "tile_impl.h"

namespace tidegate {

extern const Kernels kernels_avx2 = {tile_shape<Avx2>, Avx2::kTilePanels, find_tile_fn<Avx2>,
                                     prepare<Avx2>, activate<Avx2>, weighted_sum<Avx2>};

}  // namespace tidegate
#endif
