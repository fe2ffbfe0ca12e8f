// Embedding rows and the small element-wise operations of the decoder.
#pragma once
#include "compute.h"
#include "format.h"
#include "tensor.h"

namespace tidegate {

// Rows `ids` [T] of the table, dequantized, times `multiplier`. Throws std::out_of_range for an id that is no row.
Matrix embed(Compute& compute, const PackedMatrix& table, const std::int32_t* ids, std::int64_t tokens, float multiplier);

// Rows `rows` of x. Throws std::out_of_range for one that is not there.
Matrix gather_rows(Compute& compute, const Matrix& x, const std::int32_t* rows, std::int64_t count);

// x += scale * y.
void add(Compute& compute, const Matrix& x, const Matrix& y, float scale);

// x += sigmoid(gates[t]) * y per token; gates [T, 1].
void add_gated(Compute& compute, const Matrix& x, const Matrix& y, const Matrix& gates);

// x /= divisor.
void divide(Compute& compute, const Matrix& x, float divisor);

}  // namespace tidegate
