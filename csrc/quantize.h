// Quantization of one group of weights; see pack.h for whole matrices.
#pragma once
#include <cstdint>

#include "dispatch.h"
#include "format.h"

namespace tidegate {

// float16 bits.
struct GroupHeader {
  std::uint16_t scale, min;
};

// Codes of w[0..count), 1 <= count <= format.group.
using QuantizeGroupFn = GroupHeader (*)(const WeightFormat& format, const float* w, int count, std::uint8_t* codes);

QuantizeGroupFn quantize_group_fn(Isa isa);

}  // namespace tidegate
