#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pack.h"

namespace tidegate {
namespace {

// Fewer numbers than this are done faster than a thread wakes.
constexpr std::int64_t kGrain = 32 << 10;

template <class Body>
void for_each_row(Compute& compute, const Matrix& x, Body&& body) {
  compute.pool.parallel_for(x.rows, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, x.cols)),
                            [&](std::int64_t begin, std::int64_t end, int) {
                              for (std::int64_t t = begin; t < end; ++t) body(t);
                            });
}

void check_same_shape(const Matrix& x, const Matrix& y) {
  if (x.rows != y.rows || x.cols != y.cols) throw std::invalid_argument("the matrices have different shapes");
}

void check_rows(const std::int32_t* ids, std::int64_t count, std::int64_t limit, const char* what) {
  for (std::int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= limit)
      throw std::out_of_range(std::string(what) + " " + std::to_string(ids[i]) + " is not below " + std::to_string(limit));
}

}  // namespace

Matrix embed(Compute& compute, const PackedMatrix& table, const std::int32_t* ids, std::int64_t tokens, float multiplier) {
  check_rows(ids, tokens, table.n, "token id");
  const Matrix out = compute.workspace.matrix(tokens, table.k);
  for_each_row(compute, out, [&](std::int64_t t) {
    float* const row = out.row(t);
    unpack_row(table, ids[t], row);
    if (multiplier != 1)
      for (std::int64_t i = 0; i < out.cols; ++i) row[i] *= multiplier;
  });
  return out;
}

Matrix gather_rows(Compute& compute, const Matrix& x, const std::int32_t* rows, std::int64_t count) {
  check_rows(rows, count, x.rows, "row");
  const Matrix out = compute.workspace.matrix(count, x.cols);
  for (std::int64_t r = 0; r < count; ++r)
    std::memcpy(out.row(r), x.row(rows[r]), static_cast<std::size_t>(x.cols) * sizeof(float));
  return out;
}

void add(Compute& compute, const Matrix& x, const Matrix& y, float scale) {
  check_same_shape(x, y);
  for_each_row(compute, x, [&](std::int64_t t) {
    float* const to = x.row(t);
    const float* const from = y.row(t);
    if (scale == 1)
      for (std::int64_t i = 0; i < x.cols; ++i) to[i] += from[i];
    else
      for (std::int64_t i = 0; i < x.cols; ++i) to[i] += scale * from[i];
  });
}

void add_gated(Compute& compute, const Matrix& x, const Matrix& y, const Matrix& gates) {
  check_same_shape(x, y);
  if (gates.rows != x.rows || gates.cols != 1) throw std::invalid_argument("add_gated: gates must be [T, 1]");
  for_each_row(compute, x, [&](std::int64_t t) {
    float* const to = x.row(t);
    const float* const from = y.row(t);
    const float gate = 1.0f / (1.0f + std::exp(-*gates.row(t)));
    for (std::int64_t i = 0; i < x.cols; ++i) to[i] += gate * from[i];
  });
}

void divide(Compute& compute, const Matrix& x, float divisor) {
  for_each_row(compute, x, [&](std::int64_t t) {
    float* const row = x.row(t);
    for (std::int64_t i = 0; i < x.cols; ++i) row[i] /= divisor;
  });
}

}  // namespace tidegate
