// bindings*.cc are the only files that know Python. A bind_*() function for a few headers of the core each, called from the module
// at the end. Long calls release the GIL. Hot calls take typed handles (Matrix, Compute, ...), which cost about 0.1 us each.
#include "bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <system_error>
#include <tuple>

#include "bandwidth.h"
#include "compute.h"
#include "crc32.h"
#include "faulty_reader.h"
#include "file_set.h"
#include "host_memory.h"
#include "loader.h"
#include "slots.h"

using tidegate::Compute;
using tidegate::Matrix;

namespace {

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

// ---- host_memory.h, bandwidth.h, block_reader.h, faulty_reader.h, file_set.h ---------------------------------------

void bind_files(nb::module_& m) {
  using namespace tidegate;
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.code().value(), e.what()).ptr());
    }
  });
  m.def("populate", [](const Bytes& memory, int threads) {
    nb::gil_scoped_release release;
    return populate(memory.data(), static_cast<std::int64_t>(memory.size()), threads);
  }, "memory"_a, "threads"_a, "Makes every page of an anonymous mapping present; 0 or an errno.");
  m.def("trim_heap", &trim_heap, "Gives back what the C library keeps of freed memory.");
  m.def("fastest_read_s", [](const Bytes& memory, int threads, int rounds) {
    nb::gil_scoped_release release;
    return fastest_read_s(memory.data(), static_cast<std::int64_t>(memory.size()), threads, rounds);
  }, "memory"_a, "threads"_a, "rounds"_a, "Seconds of the fastest pass over all bytes.");
  m.def("crc32", [](const Bytes& bytes) { return crc32(0, bytes.data(), bytes.size()); }, "bytes"_a);

  nb::class_<BlockReader>(m, "BlockReader", "How blocks are read from files.");
  nb::class_<PosixReader, BlockReader>(m, "PosixReader").def(nb::init<>());
  nb::class_<FaultyReader, BlockReader>(m, "FaultyReader", "Reads with faults on purpose, for tests; see faulty_reader.h.")
      .def("__init__", [](FaultyReader* self, std::uint64_t seed, std::int64_t max_delay_us, std::int64_t fail_at,
                          std::int64_t short_at, std::int64_t end_at, bool refuse_direct) {
        new (self) FaultyReader({seed, max_delay_us, fail_at, short_at, end_at, refuse_direct});
      }, nb::kw_only(), "seed"_a = 0, "max_delay_us"_a = 0, "fail_at"_a = -1, "short_at"_a = -1, "end_at"_a = -1,
           "refuse_direct"_a = false)
      .def("close_gate", &FaultyReader::close_gate)
      .def("allow", &FaultyReader::allow, "reads"_a)
      .def("open_gate", &FaultyReader::open_gate)
      .def_prop_ro("num_waiting", &FaultyReader::num_waiting)
      .def("log", [](const FaultyReader& r) {
        std::vector<std::tuple<std::int64_t, std::int64_t, bool>> out;
        for (const ReadRecord& record : r.log()) out.emplace_back(record.offset, record.nbytes, record.direct);
        return out;
      }, "(offset, bytes, direct) of every read so far");
  nb::class_<FileSet>(m, "FileSet", "Files open for direct and for buffered reads.")
      .def(nb::init<const std::vector<std::string>&, std::shared_ptr<BlockReader>, bool>(), "paths"_a, "reader"_a,
           "page_cache"_a)
      .def("is_direct", &FileSet::is_direct, "file"_a)
      .def("read", [](FileSet& files, int file, std::int64_t offset, const Bytes& dest, std::int64_t chunk_bytes) {
        if (file < 0 || file >= files.size()) throw std::out_of_range("no such file");
        nb::gil_scoped_release release;
        const ReadResult result =
            files.read_chunked(file, offset, static_cast<std::int64_t>(dest.size()), dest.data(), chunk_bytes);
        return std::make_tuple(result.got, result.error);
      }, "file"_a, "offset"_a, "dest"_a, "chunk_bytes"_a, "Fills dest; (bytes that arrived, errno or 0).");
}

// ---- slots.h, loader.h ----------------------------------------------------------------------------------------------

void bind_loader(nb::module_& m) {
  using namespace tidegate;
  nb::class_<SlotSource>(m, "SlotSource", "Where compute finds the experts' bytes.");
  nb::enum_<SlotState>(m, "SlotState")
      .value("EMPTY", SlotState::kEmpty)
      .value("LOADING", SlotState::kLoading)
      .value("READY", SlotState::kReady)
      .value("FAILED", SlotState::kFailed);
  nb::class_<LoadFailure>(m, "LoadFailure")
      .def_ro("file", &LoadFailure::file)
      .def_ro("offset", &LoadFailure::offset)
      .def_ro("wanted_bytes", &LoadFailure::wanted_bytes)
      .def_ro("got_bytes", &LoadFailure::got_bytes)
      .def_ro("error", &LoadFailure::error)
      .def_ro("wanted_crc32", &LoadFailure::wanted_crc32)
      .def_ro("got_crc32", &LoadFailure::got_crc32)
      .def_ro("layer", &LoadFailure::layer)
      .def_ro("expert", &LoadFailure::expert);
  nb::class_<LoaderCounters>(m, "LoaderCounters")
      .def_ro("demand_loads", &LoaderCounters::demand_loads)
      .def_ro("speculative_loads", &LoaderCounters::speculative_loads)
      .def_ro("cancelled_loads", &LoaderCounters::cancelled_loads)
      .def_ro("failed_loads", &LoaderCounters::failed_loads)
      .def_ro("promoted_loads", &LoaderCounters::promoted_loads)
      .def_ro("overtaken_loads", &LoaderCounters::overtaken_loads)
      .def_ro("read_bytes", &LoaderCounters::read_bytes)
      .def_ro("wasted_bytes", &LoaderCounters::wasted_bytes)
      .def_ro("waits", &LoaderCounters::waits)
      .def_ro("wait_ns", &LoaderCounters::wait_ns)
      .def_ro("busy_ns", &LoaderCounters::busy_ns)
      .def_ro("wakes", &LoaderCounters::wakes)
      .def_ro("wake_ns", &LoaderCounters::wake_ns);
  nb::class_<Loader, SlotSource>(m, "Loader", "Threads that read blobs into slots; see loader.h.")
      .def("__init__", [](Loader* self, std::shared_ptr<FileSet> files, const std::vector<std::uintptr_t>& addresses,
                          std::int64_t slot_bytes, int threads, std::int64_t chunk_bytes, bool verify) {
        std::vector<std::uint8_t*> slots;
        for (const std::uintptr_t address : addresses) slots.push_back(reinterpret_cast<std::uint8_t*>(address));
        new (self) Loader(std::move(files), std::move(slots), slot_bytes, {threads, chunk_bytes, verify});
      }, "files"_a, "addresses"_a, "slot_bytes"_a, "threads"_a, "chunk_bytes"_a, "verify"_a,
           "The caller keeps the slots' memory until close().")
      .def("load", [](Loader& loader, int slot, int file, std::int64_t offset, std::int64_t nbytes, std::uint32_t crc,
                      bool demand, int layer, int expert) {
        loader.load(slot, {file, offset, nbytes, crc, demand, layer, expert});
      }, "slot"_a, "file"_a, "offset"_a, "nbytes"_a, "crc32"_a, "demand"_a, "layer"_a = -1, "expert"_a = -1)
      .def("cancel", &Loader::cancel, "slot"_a)
      .def("promote", &Loader::promote, "slot"_a)
      .def("wait", [](Loader& loader, int slot) { return loader.wait_ready(slot) != nullptr; }, "slot"_a, NoGil(),
           "True once the slot is ready, false if its load failed or was cancelled.")
      .def("is_ready", &Loader::is_ready, "slot"_a)
      .def("state", &Loader::state, "slot"_a)
      .def("failure", &Loader::failure, "slot"_a)
      .def("counters", &Loader::counters)
      .def("close", &Loader::close, NoGil());
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native core of tidegate";
  bind_compute(m);
  bind_files(m);
  bind_loader(m);
  bind_kernels(m);
  bind_attention(m);
  bind_layers(m);
  bind_experts(m);
}
