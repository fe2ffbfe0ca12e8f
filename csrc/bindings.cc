// The only file that knows Python. One bind_*() function a header of the core, called from the module at the end.
// Long calls release the GIL. Hot calls take typed handles (Matrix, Compute, ...), which cost about 0.1 us each.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

#include "compute.h"
#include "core.h"

namespace nb = nanobind;
using namespace nb::literals;
using tidegate::Compute;
using tidegate::Matrix;

namespace {

// Arrays that Python hands over: C-contiguous, on the CPU, of exactly this type.
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F32Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NumpyF32 = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

// ---- compute.h, workspace.h, tensor.h -------------------------------------------------------------------------------

NumpyF32 as_numpy(nb::handle owner, const Matrix& x) {
  return NumpyF32(x.data, {static_cast<std::size_t>(x.rows), static_cast<std::size_t>(x.cols)}, owner);
}

Matrix from_numpy(Compute& compute, const F32Rows& array) {
  Matrix out = compute.workspace.matrix(static_cast<std::int64_t>(array.shape(0)), static_cast<std::int64_t>(array.shape(1)));
  std::memcpy(out.data, array.data(), array.nbytes());
  return out;
}

void bind_compute(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const tidegate::WorkspaceFull& e) {
      const nb::object error = nb::module_::import_("tidegate.errors").attr("OverBudget");
      const nb::object value =
          error("workspace", e.asked_bytes, e.free_bytes, "raise --memory or compute fewer tokens at once");
      PyErr_SetObject(error.ptr(), value.ptr());
    }
  });
  nb::class_<Matrix>(m, "Matrix", "A float32 matrix in the workspace. Valid until its memory is released.")
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols);
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (tidegate::Isa isa : tidegate::available_isas()) names.emplace_back(tidegate::isa_name(isa));
    return names;
  }, "Instruction sets that this processor and this build can run, best first.");
  nb::class_<Compute>(m, "Compute", "Threads, workspace memory and instruction set of the operations.")
      .def("__init__", [](Compute* self, int threads, const Bytes& memory, const std::string& isa) {
        const auto parsed = tidegate::parse_isa(isa);
        if (!parsed) throw std::invalid_argument("no such instruction set: " + isa);
        new (self) Compute(threads, memory.data(), memory.size(), *parsed);
      }, "threads"_a, "memory"_a, "isa"_a, nb::keep_alive<1, 3>())
      .def_prop_ro("threads", [](const Compute& c) { return c.pool.threads(); })
      .def_prop_ro("isa", [](const Compute& c) { return tidegate::isa_name(c.isa); })
      .def_prop_ro("peak_bytes", [](const Compute& c) { return c.workspace.peak_bytes(); })
      .def("mark", [](const Compute& c) { return c.workspace.mark(); })
      .def("release", [](Compute& c, std::size_t mark) { c.workspace.release(mark); }, "mark"_a)
      .def("matrix", [](Compute& c, std::int64_t rows, std::int64_t cols) { return c.workspace.matrix(rows, cols); },
           "rows"_a, "cols"_a, "An uninitialised matrix in the workspace.")
      .def("from_numpy", &from_numpy, "array"_a, "A copy in the workspace.")
      .def("numpy", [](nb::handle_t<Compute> self, const Matrix& x) { return as_numpy(self, x); }, "x"_a,
           "A view; valid as long as the matrix is.");
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native core of tidegate";
  m.attr("version") = tidegate::core_version();
  bind_compute(m);
}
