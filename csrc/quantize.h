// Quantization of one group of weights; see pack.h for whole matrices.
#pragma once
#include <cstdint>

#include "dispatch.h"
#include "format.h"

namespace tidegate {

// float16 bits; or, of two-level scales, the multiplier alone.
struct GroupHeader {
  std::uint16_t scale, min;
  std::int8_t multiplier;
};

struct Quantizer {
  // Codes of w[0..count), 1 <= count <= format.group. Two-level scales need what row_scale gives of the whole row.
  GroupHeader (*quantize_group)(const WeightFormat& format, const float* w, int count, float row_scale, std::uint8_t* codes);
  // The scale under which the largest of k weights is 7 with the multiplier 127; 0 for rows of almost nothing.
  float (*row_scale)(const float* w, std::int64_t k);
};

const Quantizer& quantizer(Isa isa);

}  // namespace tidegate
