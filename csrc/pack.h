// Between plain matrices and the packed formats. The numpy twins in src/tidegate/quant/pack.py define every bit.
#pragma once
#include <cstdint>

#include "format.h"
#include "pool.h"

namespace tidegate {

// Codes of a row-major [n, k] matrix, and float16 bits of its scales and (if the format has them) minima [n, groups].
struct CodedMatrix {
  const std::uint8_t* codes;
  const std::uint16_t* scales;
  const std::uint16_t* mins;
};

// Quantizes and packs row-major w [n, k], which must be finite; `out` takes format.packed_bytes(n, k).
void pack(Pool& pool, const float* w, std::int64_t n, std::int64_t k, const WeightFormat& format, std::uint8_t* out);

// Packs given codes (4-bit ones below 16) without touching a number.
void pack_codes(Pool& pool, const CodedMatrix& coded, std::int64_t n, std::int64_t k, const WeightFormat& format,
                std::uint8_t* out);

// The float32 matrix [n, k] that packed bytes stand for.
void unpack(Pool& pool, const PackedMatrix& packed, float* out);

// Row `row` of it, k numbers.
void unpack_row(const PackedMatrix& packed, std::int64_t row, float* out);

}  // namespace tidegate
