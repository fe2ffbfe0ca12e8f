// Python's view of whole layers.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "layers.h"

using namespace tidegate;

void bind_layers(nb::module_& m) {
  nb::class_<LayerAtHand>(m, "LayerAtHand", "What run_at_hand needs of a layer.")
      .def("__init__", [](LayerAtHand* self, const NormWeights& attention_norm, const PackedMatrix& qkv, const GroupedAttention& attention,
                          const PackedMatrix& out, const NormWeights& moe_norm, const RouterParams& router, const ExpertLayout& layout,
                          const ActivationParams& activation, const LayerBook& book) {
        if (book.num_experts() != router.num_experts) throw std::invalid_argument("a book of as many experts is needed");
        new (self) LayerAtHand{attention_norm, qkv, attention, out, moe_norm, router, layout, activation, &book};
      }, "attention_norm"_a, "qkv"_a, "attention"_a, "out"_a, "moe_norm"_a, "router"_a, "layout"_a, "activation"_a,
           "book"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 10>());
  // A list of them that need not be read anew for every step.
  using Layers = std::vector<LayerAtHand>;
  struct Stack {
    Layers layers;
  };
  nb::class_<Stack>(m, "Layers", "Layers in their order.")
      .def("__init__", [](Stack* self, const Layers& layers) { new (self) Stack{layers}; }, "layers"_a, nb::keep_alive<1, 2>());
  m.def("attention", &attention_half, "compute"_a, "kv"_a, "step"_a, "layer"_a, "x"_a, "norm"_a, "qkv"_a, "out"_a, NoGil(),
        "norm, linear, attend and linear in one call.");
  m.def("run_at_hand", [](Compute& compute, const KvPages& kv, const Step& step, const Matrix& x, const Stack& stack, float scale,
                          SlotSource& source) {
    const Progress done = run_at_hand(compute, kv, step, x, stack.layers, scale, source);
    return std::tuple(done.halves, done.experts);
  }, "compute"_a, "kv"_a, "step"_a, "x"_a, "layers"_a, "scale"_a, "source"_a, NoGil(),
        "How many halves of layers could be done, x changed by them, and by how many experts; see layers.h.");
}
