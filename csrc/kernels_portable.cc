#define TIDEGATE_UNROLL

#include "activation_impl.h"
#include "prepare_impl.h"
#include "simd_portable.h"
#include "tile_impl.h"

namespace tidegate {

extern const Kernels kernels_portable = {tile_shape<Portable>, Portable::kTilePanels, find_tile_fn<Portable>,
                                         prepare<Portable>, activate<Portable>, weighted_sum<Portable>};

}  // namespace tidegate
