// Python's view of norm, attention, routing and sampling.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>

#include "attention.h"
#include "linear.h"
#include "route.h"
#include "sample.h"

using namespace tidegate;

namespace {

// ---- step.h, attention.h -------------------------------------------------------------------------------------------------

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

KvFormat parse_kv_format(const std::string& name) {
  if (name == "f32") return KvFormat::f32;
  if (name == "f16") return KvFormat::f16;
  if (name == "int8") return KvFormat::int8;
  throw std::invalid_argument("no such format of the KV cache: " + name);
}

// Arrays are borrowed, so none may be converted on the way in: .noconvert() refuses instead, keep_alive holds the rest.
void bind_grouped(nb::module_& m) {
  nb::class_<KvPages>(m, "KvPages", "KV pages in the layout of backends/operands.py.")
      .def("__init__", [](KvPages* self, const Bytes& memory, int num_layers, int kv_heads, int k_dim, int v_dim,
                          const std::string& format) {
        new (self) KvPages(memory.data(), memory.size(), num_layers, kv_heads, k_dim, v_dim, parse_kv_format(format));
      }, "memory"_a.noconvert(), "num_layers"_a, "kv_heads"_a, "k_dim"_a, "v_dim"_a, "format"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("num_pages", &KvPages::num_pages);
  m.attr("PAGE_TOKENS") = kPageTokens;
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
        check_layer(a);
        new (self) GroupedAttention(a);
      }, "layer"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "v_head_dim"_a, "scale"_a, "clip"_a, "window"_a, "qk_norm"_a,
           "q_norm"_a.none(), "k_norm"_a.none(), "sinks"_a.noconvert().none(), "rope"_a.none(), nb::keep_alive<1, 11>(),
           nb::keep_alive<1, 12>(), nb::keep_alive<1, 13>(), nb::keep_alive<1, 14>());
  m.def("norm", &norm, "compute"_a, "x"_a, "weights"_a);
  m.def("attend", &attend, "compute"_a, "kv"_a, "step"_a, "layer"_a, "qkv"_a, NoGil());
}

void bind_latent(nb::module_& m) {
  nb::class_<LatentAttention>(m, "LatentAttention", "What attend_latent needs of a layer.")
      .def("__init__", [](LatentAttention* self, int layer, int num_heads, int kv_lora_rank, int nope_dim, int v_head_dim,
                          float scale, int window, const NormWeights& kv_norm, const std::optional<F32Vector>& sinks,
                          RopeTable& rope, const PackedMatrix& k_up, const PackedMatrix& v_up) {
        require_size("sinks", sinks, num_heads);
        const LatentAttention a{layer, num_heads, kv_lora_rank, nope_dim, v_head_dim, scale, window, kv_norm,
                                data_or_null(sinks), &rope, k_up, v_up};
        check_layer(a);
        new (self) LatentAttention(a);
      }, "layer"_a, "num_heads"_a, "kv_lora_rank"_a, "nope_dim"_a, "v_head_dim"_a, "scale"_a, "window"_a, "kv_norm"_a,
           "sinks"_a.noconvert().none(), "rope"_a, "k_up"_a, "v_up"_a, nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
           nb::keep_alive<1, 11>(), nb::keep_alive<1, 12>(), nb::keep_alive<1, 13>());
  m.def("attend_latent", &attend_latent, "compute"_a, "pages"_a, "step"_a, "layer"_a, "q"_a, "kv"_a, NoGil());
}

// ---- route.h -------------------------------------------------------------------------------------------------------------

Scoring parse_scoring(const std::string& name) {
  if (name == "softmax") return Scoring::softmax;
  if (name == "topk_softmax") return Scoring::topk_softmax;
  if (name == "sigmoid") return Scoring::sigmoid;
  if (name == "sparsemixer") return Scoring::sparsemixer;
  throw std::invalid_argument("no such router scoring: " + name);
}

nb::tuple route_to_numpy(Compute& compute, const Matrix& x, const RouterParams& router) {
  const auto ids = new_numpy<std::int32_t>(x.rows, router.top_k);
  const auto weights = new_numpy<float>(x.rows, router.top_k);
  const auto said = new_numpy<float>(router.num_experts);
  {
    const nb::gil_scoped_release released;
    ::tidegate::route(compute, x, router, ids.data(), weights.data(), said.data());
  }
  return nb::make_tuple(ids, weights, said);
}

// The normed rows, and their experts as route_to_numpy.
nb::tuple norm_route(Compute& compute, const Matrix& x, const NormWeights& weights, const RouterParams& router) {
  const Matrix normed = norm(compute, x, weights);
  const nb::tuple chosen = route_to_numpy(compute, normed, router);
  return nb::make_tuple(normed, chosen[0], chosen[1], chosen[2]);
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
        check_router(r);
        new (self) RouterParams(r);
      }, "weight_ED"_a.noconvert(), "bias_E"_a.noconvert().none(), "correction_E"_a.noconvert().none(), "top_k"_a, "scoring"_a,
           "normalize"_a, "scaling"_a, "num_groups"_a, "topk_groups"_a, "group_best"_a, "jitter"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  m.def("norm_route", &norm_route, "compute"_a, "x"_a, "norm"_a, "router"_a, "norm and route in one call: its result first.");
  m.def("route", &route_to_numpy, "compute"_a, "x"_a, "router"_a,
        "Expert ids and weights [T, K] and the mean of the logits [E], plain numpy.");
  m.def("rank", [](const Matrix& scores, int top_k, int most) {
    Ranking found = rank(scores, top_k, most);
    return std::tuple(std::move(found.experts), std::move(found.margins));
  }, "scores"_a, "top_k"_a, "most"_a, "(experts, margins), a list a row; see route.h.");
}

// ---- sample.h ------------------------------------------------------------------------------------------------------------

void bind_sample(nb::module_& m) {
  m.def("choose_token", [](const F32Vector& logits, double temperature, std::int64_t top_k, double top_p, double min_p,
                           double uniform, double repetition, double presence, double frequency,
                           const std::optional<I32Vector>& seen, const std::optional<I32Vector>& counted,
                           const std::optional<I32Vector>& counts) {
    Penalties p{repetition, presence, frequency};
    if (seen) p.seen = seen->data(), p.num_seen = static_cast<std::int64_t>(seen->size());
    if (counted.has_value() != counts.has_value() || (counted && counted->size() != counts->size()))
      throw std::invalid_argument("counted tokens and their counts differ in length");
    if (counted) p.counted = counted->data(), p.counts = counts->data(), p.num_counted = static_cast<std::int64_t>(counted->size());
    return choose_token(logits.data(), static_cast<std::int64_t>(logits.size()), p,
                                  {temperature, top_k, top_p, min_p, uniform});
  }, "logits_V"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a, "repetition"_a = 1.0, "presence"_a = 0.0,
        "frequency"_a = 0.0, "seen"_a = nb::none(), "counted"_a = nb::none(), "counts"_a = nb::none());
  m.def("log_probs", [](const F32Vector& logits, std::int32_t token, std::int64_t num_top) {
    std::vector<std::tuple<int, double>> pairs;
    for (const LogProb& p : log_probs(logits.data(), static_cast<std::int64_t>(logits.size()), token, num_top))
      pairs.emplace_back(p.token, p.value);
    return pairs;
  }, "logits_V"_a, "token"_a, "num_top"_a, "(token, log probability) of `token`, then of the most probable tokens.");
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_grouped(m);
  bind_latent(m);
  bind_route(m);
  bind_sample(m);
}
