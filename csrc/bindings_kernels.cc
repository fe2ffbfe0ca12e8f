// Python's view of packed weights, the operations on them, and packing.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "bandwidth.h"
#include "elementwise.h"
#include "linear.h"
#include "moe.h"
#include "pack.h"
#include "ready_slots.h"

using namespace tidegate;

namespace {

using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U16Rows = nb::ndarray<const std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ByteRows = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F32RowsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::int64_t length(std::size_t n) { return static_cast<std::int64_t>(n); }

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

PackedMatrix make_packed(const ConstBytes& data, const WeightFormat& format, std::int64_t n, std::int64_t k,
                         const std::optional<F32Vector>& bias, bool wide_inputs) {
  require(n > 0 && k > 0, "a packed matrix needs at least one row and one column");
  require(length(data.size()) >= format.packed_bytes(n, k), "the packed bytes are fewer than the format needs");
  require(!bias || length(bias->size()) == n, "the bias has another length than the matrix has rows");
  return {data.data(), format, n, k, bias ? bias->data() : nullptr, wide_inputs};
}

void bind_packed(nb::module_& m) {
  nb::class_<WeightFormat>(m, "WeightFormat", "The native twin of quant.formats.Format.")
      .def("__init__", [](WeightFormat* self, const std::string& kind, int group, bool has_min, bool two_level) {
        const auto format = WeightFormat::make(kind, group, has_min, two_level);
        require(format.has_value(), "no such weight format");
        new (self) WeightFormat(*format);
      }, "kind"_a, "group"_a, "has_min"_a, "two_level"_a)
      .def("packed_bytes", &WeightFormat::packed_bytes, "n"_a, "k"_a);
  nb::class_<PackedMatrix>(m, "PackedMatrix", "A packed weight [n, k] and its bias; keeps both arrays alive.")
      .def("__init__", [](PackedMatrix* self, const ConstBytes& data, const WeightFormat& format, std::int64_t n,
                          std::int64_t k, const std::optional<F32Vector>& bias, bool wide_inputs) {
        new (self) PackedMatrix(make_packed(data, format, n, k, bias, wide_inputs));
      }, "data"_a.noconvert(), "format"_a, "n"_a, "k"_a, "bias"_a.noconvert().none(), "wide_inputs"_a = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 6>());
}

void bind_operations(nb::module_& m) {
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("clamped_swiglu", Activation::clamped_swiglu);
  nb::class_<ActivationParams>(m, "ActivationParams")
      .def(nb::init<Activation, float, float>(), "kind"_a, "alpha"_a, "limit"_a);
  m.def("linear", &linear, "compute"_a, "x"_a, "weight"_a, NoGil());
  m.def("gated_mlp", &gated_mlp, "compute"_a, "x"_a, "gate_up"_a, "down"_a, "activation"_a, NoGil());
  m.def("embed", [](Compute& compute, const PackedMatrix& table, const I32Vector& ids, float multiplier) {
    return embed(compute, table, ids.data(), length(ids.size()), multiplier);
  }, "compute"_a, "table"_a, "ids"_a, "multiplier"_a);
  m.def("gather_rows", [](Compute& compute, const Matrix& x, const I32Vector& rows) {
    return gather_rows(compute, x, rows.data(), length(rows.size()));
  }, "compute"_a, "x"_a, "rows"_a);
  m.def("add", &add, "compute"_a, "x"_a, "y"_a, "scale"_a);
  m.def("add_gated", &add_gated, "compute"_a, "x"_a, "y"_a, "gates"_a);
  m.def("divide", &divide, "compute"_a, "x"_a, "divisor"_a);
  m.def("read_all", [](Compute& compute, const ConstBytes& memory) {
    nb::gil_scoped_release release;
    return read_all(compute.pool, memory.data(), length(memory.size()));
  }, "compute"_a, "memory"_a, "Reads whole cache lines of memory once, as fast as it goes; a sum that means nothing.");
}

// Holds what MoeStep only points to.
struct MoeCall {
  I32Rows ids;
  F32Rows weights;
  MoeStep step;
};

void bind_moe(nb::module_& m) {
  nb::class_<ReadySlots, SlotSource>(m, "ReadySlots", "Experts that are in memory; slot i is the i-th array.")
      .def("__init__", [](ReadySlots* self, const std::vector<ConstBytes>& slots) {
        std::vector<const std::uint8_t*> addresses;
        for (const ConstBytes& slot : slots) addresses.push_back(slot.data());
        new (self) ReadySlots(std::move(addresses));
      }, "slots"_a, nb::keep_alive<1, 2>());
  nb::class_<ExpertLayout>(m, "ExpertLayout", "The native twin of quant.layout.ExpertLayout.")
      .def(nb::init<std::int64_t, std::int64_t, WeightFormat, WeightFormat, bool, std::int64_t, std::int64_t, std::int64_t>(),
           "hidden_size"_a, "expert_dim"_a, "format"_a, "down_format"_a, "has_bias"_a, "up_offset"_a, "down_offset"_a,
           "bias_offset"_a);
  nb::class_<MoeCall>(m, "MoeStep", "The routed experts of one layer; see moe.h.")
      .def("__init__", [](MoeCall* self, Compute& compute, const Matrix& x, const I32Rows& ids, const F32Rows& weights,
                          const ExpertLayout& layout, const ActivationParams& activation) {
        require(length(ids.shape(0)) == x.rows && length(weights.shape(0)) == x.rows && ids.shape(1) == weights.shape(1),
                "expert ids and weights must both be [tokens, experts per token]");
        new (self) MoeCall{ids, weights, MoeStep(compute, x, ids.data(), weights.data(), length(ids.shape(1)), layout, activation)};
      }, "compute"_a, "x"_a, "ids"_a, "weights"_a, "layout"_a, "activation"_a, nb::keep_alive<1, 2>())
      .def("run", [](MoeCall& self, const std::vector<int>& experts, const std::vector<int>& slots, SlotSource& source) {
        nb::gil_scoped_release release;
        return self.step.run(experts, slots, source);
      }, "experts"_a, "slots"_a, "source"_a, "-1, or the slot whose load failed.")
      .def("finish", [](MoeCall& self) { return self.step.finish(); }, NoGil());
}

void bind_pack(nb::module_& m) {
  m.def("pack", [](const F32Rows& w, const WeightFormat& format, const Bytes& out, int threads) {
    const std::int64_t n = length(w.shape(0)), k = length(w.shape(1));
    require(length(out.size()) == format.packed_bytes(n, k), "out must have exactly the packed size");
    nb::gil_scoped_release release;
    Pool pool(threads);
    pack(pool, w.data(), n, k, format, out.data());
  }, "w"_a, "format"_a, "out"_a, "threads"_a);
  m.def("pack_codes", [](const ByteRows& codes, const U16Rows& scales, const std::optional<U16Rows>& mins,
                         const WeightFormat& format, const Bytes& out, int threads) {
    const std::int64_t n = length(codes.shape(0)), k = length(codes.shape(1));
    require(format.is_integer() && !format.two_level && format.has_min == mins.has_value(),
            "the format does not fit scales and minima");
    const auto fits = [&](const U16Rows& a) {
      return length(a.shape(0)) == n && length(a.shape(1)) == format.padded_k(k) / format.group;
    };
    require(fits(scales) && (!mins || fits(*mins)), "scales and minima must be [n, groups]");
    require(length(out.size()) == format.packed_bytes(n, k), "out must have exactly the packed size");
    nb::gil_scoped_release release;
    Pool pool(threads);
    pack_codes(pool, {codes.data(), scales.data(), mins ? mins->data() : nullptr}, n, k, format, out.data());
  }, "codes"_a, "scales"_a, "mins"_a.none(), "format"_a, "out"_a, "threads"_a);
  m.def("unpack", [](const PackedMatrix& packed, const F32RowsOut& out, int threads) {
    require(length(out.shape(0)) == packed.n && length(out.shape(1)) == packed.k, "out must be [n, k]");
    nb::gil_scoped_release release;
    Pool pool(threads);
    unpack(pool, packed, out.data());
  }, "packed"_a, "out"_a, "threads"_a);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  bind_packed(m);
  bind_operations(m);
  bind_moe(m);
  bind_pack(m);
}
