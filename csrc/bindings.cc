// bindings*.cc are the only files that know Python. One bind_*() function a header of the core, called from the module at
// the end. Long calls release the GIL. Hot calls take typed handles (Matrix, Compute, ...), which cost about 0.1 us each.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>

#include "attention.h"
#include "compute.h"
#include "core.h"
#include "crc32.h"
#include "faulty_reader.h"
#include "file_set.h"
#include "host_memory.h"
#include "loader.h"
#include "route.h"
#include "sample.h"
#include "slots.h"

using tidegate::Compute;
using tidegate::Matrix;

namespace {

using NumpyF32 = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using NumpyI32 = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>;

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

// ---- host_memory.h, block_reader.h, faulty_reader.h, file_set.h -----------------------------------------------------

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
      .def_ro("got_crc32", &LoadFailure::got_crc32);
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
      .def_ro("busy_ns", &LoaderCounters::busy_ns);
  nb::class_<Loader, SlotSource>(m, "Loader", "Threads that read blobs into slots; see loader.h.")
      .def("__init__", [](Loader* self, std::shared_ptr<FileSet> files, const std::vector<std::uintptr_t>& addresses,
                          std::int64_t slot_bytes, int threads, std::int64_t chunk_bytes, bool verify) {
        std::vector<std::uint8_t*> slots;
        for (const std::uintptr_t address : addresses) slots.push_back(reinterpret_cast<std::uint8_t*>(address));
        new (self) Loader(std::move(files), std::move(slots), slot_bytes, {threads, chunk_bytes, verify});
      }, "files"_a, "addresses"_a, "slot_bytes"_a, "threads"_a, "chunk_bytes"_a, "verify"_a,
           "The caller keeps the slots' memory until close().")
      .def("load", [](Loader& loader, int slot, int file, std::int64_t offset, std::int64_t nbytes, std::uint32_t crc,
                      bool demand) { loader.load(slot, {file, offset, nbytes, crc, demand}); },
           "slot"_a, "file"_a, "offset"_a, "nbytes"_a, "crc32"_a, "demand"_a)
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

// ---- step.h, attention.h -------------------------------------------------------------------------------------------------

using tidegate::GroupedAttention;
using tidegate::KvPages;
using tidegate::NormWeights;
using tidegate::RopeTable;
using tidegate::Step;

const float* data_or_null(const std::optional<F32Vector>& array) { return array ? array->data() : nullptr; }

void require_size(const char* what, const std::optional<F32Vector>& array, std::int64_t size) {
  if (array && static_cast<std::int64_t>(array->size()) != size)
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(array->size()) + " numbers, wanted " +
                                std::to_string(size));
}

GroupedAttention::QkNorm parse_qk_norm(const std::string& name) {
  if (name == "none") return GroupedAttention::QkNorm::none;
  if (name == "head") return GroupedAttention::QkNorm::head;
  if (name == "full") return GroupedAttention::QkNorm::full;
  throw std::invalid_argument("no such qk_norm: " + name);
}

// Arrays are borrowed, so none may be converted on the way in: .noconvert() refuses instead, keep_alive holds the rest.
void bind_attention(nb::module_& m) {
  nb::class_<KvPages>(m, "KvPages", "KV pages in the layout of backends/base.py.")
      .def("__init__", [](KvPages* self, const Bytes& memory, int num_layers, int kv_heads, int k_dim, int v_dim, bool is_half) {
        new (self) KvPages(memory.data(), memory.size(), num_layers, kv_heads, k_dim, v_dim, is_half);
      }, "memory"_a.noconvert(), "num_layers"_a, "kv_heads"_a, "k_dim"_a, "v_dim"_a, "is_half"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("num_pages", &KvPages::num_pages);
  m.attr("PAGE_TOKENS") = tidegate::kPageTokens;
  nb::class_<Step>(m, "Step", "The tokens of a forward pass and the pages of their sequences.")
      .def("__init__", [](Step* self, const I32Vector& positions, const I32Vector& sequences, const I32Rows& block_tables,
                          std::int64_t num_pages) {
        if (positions.size() != sequences.size()) throw std::invalid_argument("positions and sequences differ in length");
        new (self) Step(static_cast<std::int64_t>(positions.size()), positions.data(), sequences.data(), block_tables.data(),
                        static_cast<std::int64_t>(block_tables.shape(0)), static_cast<std::int64_t>(block_tables.shape(1)),
                        num_pages);
      }, "positions_T"_a.noconvert(), "sequence_T"_a.noconvert(), "block_tables"_a.noconvert(), "num_pages"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>());
  nb::class_<RopeTable>(m, "RopeTable", "Cosines and sines of the current step.")
      .def("__init__", [](RopeTable* self, const F32Vector& inv_freq, float factor, bool interleaved) {
        new (self) RopeTable(inv_freq.data(), static_cast<std::int64_t>(inv_freq.size()), factor, interleaved);
      }, "inv_freq"_a, "factor"_a, "interleaved"_a);
  nb::class_<NormWeights>(m, "NormWeights", "RMSNorm, or LayerNorm if there is a bias.")
      .def("__init__", [](NormWeights* self, const F32Vector& weight, const std::optional<F32Vector>& bias, float eps) {
        const auto width = static_cast<std::int64_t>(weight.size());
        require_size("norm bias", bias, width);
        new (self) NormWeights{weight.data(), data_or_null(bias), eps, width};
      }, "weight"_a.noconvert(), "bias"_a.noconvert().none(), "eps"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
  nb::class_<GroupedAttention>(m, "GroupedAttention", "What attend needs of a layer.")
      .def("__init__", [](GroupedAttention* self, int layer, int num_heads, int num_kv_heads, int head_dim, int v_head_dim,
                          float scale, float clip, int window, const std::string& qk_norm, const NormWeights* q_norm,
                          const NormWeights* k_norm, const std::optional<F32Vector>& sinks, RopeTable* rope) {
        require_size("sinks", sinks, num_heads);
        GroupedAttention a{layer, num_heads, num_kv_heads, head_dim, v_head_dim, scale, clip, window, parse_qk_norm(qk_norm),
                           q_norm ? *q_norm : NormWeights{}, k_norm ? *k_norm : NormWeights{}, data_or_null(sinks), rope};
        tidegate::check_layer(a);
        new (self) GroupedAttention(a);
      }, "layer"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "v_head_dim"_a, "scale"_a, "clip"_a, "window"_a, "qk_norm"_a,
           "q_norm"_a.none(), "k_norm"_a.none(), "sinks"_a.noconvert().none(), "rope"_a.none(), nb::keep_alive<1, 11>(),
           nb::keep_alive<1, 12>(), nb::keep_alive<1, 13>(), nb::keep_alive<1, 14>());
  m.def("norm", &tidegate::norm, "compute"_a, "x"_a, "weights"_a);
  m.def("attend", &tidegate::attend, "compute"_a, "kv"_a, "step"_a, "layer"_a, "qkv"_a,
        nb::call_guard<nb::gil_scoped_release>());
}

// ---- route.h -------------------------------------------------------------------------------------------------------------

using tidegate::RouterParams;

tidegate::Scoring parse_scoring(const std::string& name) {
  if (name == "softmax") return tidegate::Scoring::softmax;
  if (name == "topk_softmax") return tidegate::Scoring::topk_softmax;
  if (name == "sigmoid") return tidegate::Scoring::sigmoid;
  if (name == "sparsemixer") return tidegate::Scoring::sparsemixer;
  throw std::invalid_argument("no such router scoring: " + name);
}

// A new array that numpy owns.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<2>> new_array(std::int64_t rows, std::int64_t cols) {
  T* const data = new T[static_cast<std::size_t>(rows * cols)];
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {data, {static_cast<std::size_t>(rows), static_cast<std::size_t>(cols)}, owner};
}

nb::tuple route(Compute& compute, const Matrix& x, const RouterParams& router) {
  NumpyI32 ids = new_array<std::int32_t>(x.rows, router.top_k);
  NumpyF32 weights = new_array<float>(x.rows, router.top_k);
  {
    const nb::gil_scoped_release released;
    tidegate::route(compute, x, router, ids.data(), weights.data());
  }
  return nb::make_tuple(ids, weights);
}

void bind_route(nb::module_& m) {
  nb::class_<RouterParams>(m, "RouterParams", "Router weights and the rule of choice.")
      .def("__init__", [](RouterParams* self, const F32Rows& weight, const std::optional<F32Vector>& bias,
                          const std::optional<F32Vector>& correction, int top_k, const std::string& scoring, bool normalize,
                          double scaling, int num_groups, int topk_groups, int group_best, double jitter) {
        const int experts = static_cast<int>(weight.shape(0));
        require_size("router bias", bias, experts);
        require_size("router correction", correction, experts);
        const RouterParams r{weight.data(), data_or_null(bias), data_or_null(correction),
                             static_cast<std::int64_t>(weight.shape(1)), experts, top_k, parse_scoring(scoring), normalize,
                             scaling, num_groups, topk_groups, group_best, jitter};
        tidegate::check_router(r);
        new (self) RouterParams(r);
      }, "weight_ED"_a.noconvert(), "bias_E"_a.noconvert().none(), "correction_E"_a.noconvert().none(), "top_k"_a, "scoring"_a,
           "normalize"_a, "scaling"_a, "num_groups"_a, "topk_groups"_a, "group_best"_a, "jitter"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  m.def("route", &route, "compute"_a, "x"_a, "router"_a, "Expert ids and weights [T, K], plain numpy.");
}

// ---- sample.h ------------------------------------------------------------------------------------------------------------

void bind_sample(nb::module_& m) {
  m.def("choose_token", [](const F32Vector& logits, double temperature, std::int64_t top_k, double top_p, double min_p,
                           double uniform, double repetition, double presence, double frequency,
                           const std::optional<I32Vector>& seen, const std::optional<I32Vector>& counted,
                           const std::optional<I32Vector>& counts) {
    tidegate::Penalties p{repetition, presence, frequency};
    if (seen) p.seen = seen->data(), p.num_seen = static_cast<std::int64_t>(seen->size());
    if (counted.has_value() != counts.has_value() || (counted && counted->size() != counts->size()))
      throw std::invalid_argument("counted tokens and their counts differ in length");
    if (counted) p.counted = counted->data(), p.counts = counts->data(), p.num_counted = static_cast<std::int64_t>(counted->size());
    return tidegate::choose_token(logits.data(), static_cast<std::int64_t>(logits.size()), p,
                                  {temperature, top_k, top_p, min_p, uniform});
  }, "logits_V"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a, "repetition"_a = 1.0, "presence"_a = 0.0,
        "frequency"_a = 0.0, "seen"_a = nb::none(), "counted"_a = nb::none(), "counts"_a = nb::none());
  m.def("log_probs", [](const F32Vector& logits, std::int32_t token, std::int64_t num_top) {
    std::vector<std::tuple<int, double>> pairs;
    for (const tidegate::LogProb& p : tidegate::log_probs(logits.data(), static_cast<std::int64_t>(logits.size()), token, num_top))
      pairs.emplace_back(p.token, p.value);
    return pairs;
  }, "logits_V"_a, "token"_a, "num_top"_a, "(token, log probability) of `token`, then of the most probable tokens.");
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native core of tidegate";
  m.attr("version") = tidegate::core_version();
  bind_compute(m);
  bind_attention(m);
  bind_route(m);
  bind_sample(m);
  bind_files(m);
  bind_loader(m);
  bind_kernels(m);
}
