// What the binding files share.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>

namespace nb = nanobind;
using namespace nb::literals;

// Arrays that Python hands over: C-contiguous, on the CPU, of exactly this type.
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F32Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F32Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F32Out = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using I32Vector = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using I32Rows = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A new array of this shape that numpy owns, uninitialised.
template <class T, class... Sizes>
nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Sizes)>> new_numpy(Sizes... sizes) {
  T* const data = new T[(std::size_t{1} * ... * static_cast<std::size_t>(sizes))];
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {data, {static_cast<std::size_t>(sizes)...}, owner};
}

// For calls that may take longer than a few microseconds.
using NoGil = nb::call_guard<nb::gil_scoped_release>;

// bindings_kernels.cc
void bind_kernels(nb::module_& m);
// bindings_attention.cc
void bind_attention(nb::module_& m);
// bindings_layers.cc
void bind_layers(nb::module_& m);
// bindings_experts.cc
void bind_experts(nb::module_& m);
