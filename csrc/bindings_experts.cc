// Python bindings of the expert cache's counts, and of gates and the odds of their guesses. See bindings.cc for the rules.
#include "bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "decayed_uses.h"
#include "gate.h"
#include "layer_book.h"
#include "odds.h"

using namespace tidegate;

namespace {

void bind_odds(nb::module_& m) {
  nb::class_<DecayedUses>(m, "DecayedUses", "Uses of a layer's experts that fade; see decayed_uses.h.")
      .def(nb::init<int, double>(), "num_experts"_a, "half_life"_a)
      .def("use", &DecayedUses::use, "experts"_a)
      .def("value", &DecayedUses::value, "expert"_a)
      .def("set_resident", &DecayedUses::set_resident, "expert"_a, "is_resident"_a)
      .def("lowest", &DecayedUses::lowest, "kept"_a)
      .def("ranks", &DecayedUses::ranks, "experts"_a);
  nb::class_<LayerBook>(m, "LayerBook", "Where the experts of a layer are; see layer_book.h.")
      .def(nb::init<int>(), "num_experts"_a)
      .def("insert", &LayerBook::insert, "expert"_a, "slot"_a, "is_unused"_a)
      .def("use", &LayerBook::use, "expert"_a)
      .def("drop", &LayerBook::drop, "expert"_a)
      .def("slot_of", &LayerBook::slot_of, "expert"_a)
      .def("is_unused", &LayerBook::is_unused, "expert"_a);
  nb::class_<Odds>(m, "Odds", "What guesses at experts are worth; see odds.h.")
      .def("__init__", [](Odds* self, int num_layers, int num_experts, const std::vector<Curve>& curves, double half_life,
                          double least_heat, double learning_rate, double floor, double rise, double fall, double early) {
        new (self) Odds(num_layers, num_experts, curves, half_life, least_heat, learning_rate, {floor, rise, fall, early, 0.0});
      }, "num_layers"_a, "num_experts"_a, "curves"_a, "half_life"_a, "least_heat"_a, "learning_rate"_a, nb::kw_only(), "floor"_a,
           "rise"_a, "fall"_a, "early"_a)
      .def_prop_rw("floor", [](const Odds& odds) { return odds.demands.floor; }, [](Odds& odds, double v) { odds.demands.floor = v; })
      .def_prop_rw("bar", [](const Odds& odds) { return odds.demands.bar; }, [](Odds& odds, double v) { odds.demands.bar = v; })
      .def_ro("num_guesses", &Odds::num_guesses)
      .def_ro("num_missing", &Odds::num_missing)
      .def("threshold", &Odds::threshold, "distance"_a)
      .def("weigh", [](Odds& odds, int layer, int distance, const std::vector<int>& ranked, const std::vector<float>& margins,
                       const LayerBook& here, int per_token) {
        if (margins.size() < ranked.size()) throw std::invalid_argument("a guess wants a margin for every expert");
        Odds::Worthy found = odds.weigh(layer, distance, ranked.data(), margins.data(), static_cast<int>(ranked.size()), here, per_token);
        return std::tuple(std::move(found.loads), found.num_dropped);
      }, "layer"_a, "distance"_a, "ranked"_a, "margins"_a, "here"_a, "per_token"_a, "(loads, how many are dropped)")
      .def("loaded", &Odds::loaded, "layer"_a, "expert"_a)
      .def("learn", &Odds::learn, "layer"_a, "needed"_a)
      .def("forget", &Odds::forget);
}

nb::tuple rank_lists(Ranking found) { return nb::make_tuple(std::move(found.experts), std::move(found.margins)); }

// None if nothing is worth a load and nothing is dropped, which is most often; else what the pyi says.
nb::object found_by(const Gate* gate, const Odds::Worthy& found) {
  if (found.loads.empty() && found.num_dropped == 0) return nb::none();
  const std::vector<int> named(gate->experts(), gate->experts() + gate->top_k());
  return nb::make_tuple(found.loads, found.num_dropped, named);
}

void bind_gates(nb::module_& m) {
  nb::class_<Gate>(m, "Gate", "A gate that guesses at a router; see gate.h.")
      .def("__init__", [](Gate* self, Compute& compute, const PackedMatrix& weight, const F32Out& bias, const NormWeights* norm,
                          int top_k, int most) {
        const auto normed = norm ? std::optional(*norm) : std::nullopt;
        new (self) Gate(compute, weight, bias.data(), normed, top_k, most);
      }, "compute"_a, "weight"_a, "bias_E"_a.noconvert(), "norm"_a.none(), "top_k"_a, "most"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("scores", &Gate::scores, "x"_a)
      .def("guess", [](Gate& gate, const Matrix& x) { return rank_lists(gate.guess(x)); }, "x"_a)
      .def("follow", [](Gate& gate, const F32Vector& heard) { gate.follow(heard.data()); }, "heard_E"_a.noconvert());
  nb::class_<Sight>(m, "Sight", "What is guessed about a layer and from it; see gate.h.")
      .def("__init__", [](Sight* self, Odds& odds, int layer, Gate* start, Gate* before, Gate* next, const LayerBook& here,
                          const LayerBook* there) {
        if (next != nullptr && there == nullptr) throw std::invalid_argument("a guess at the next layer wants its book");
        new (self) Sight{&odds, layer, start, before, next, &here, there};
      }, "odds"_a, "layer"_a, "start"_a.none(), "before"_a.none(), "next"_a.none(), "here"_a, "there"_a.none(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
           nb::keep_alive<1, 8>())
      .def("at_start", [](const Sight& sight, const Matrix& x) { return found_by(sight.start, sight.at_start(x)); }, "x"_a)
      .def("after_route", [](const Sight& sight, const Matrix& x, const std::vector<int>& needed, const F32Vector& heard) {
        return found_by(sight.next, sight.after_route(x, needed, heard.data()));
      }, "x"_a, "needed"_a, "heard_E"_a.noconvert());
}

}  // namespace

void bind_experts(nb::module_& m) {
  bind_odds(m);
  bind_gates(m);
}
