// Python bindings of the expert cache's counts and odds. See bindings.cc for the rules.
#include "bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "decayed_uses.h"
#include "odds.h"

using tidegate::Curve;
using tidegate::DecayedUses;
using tidegate::Odds;

void bind_experts(nb::module_& m) {
  nb::class_<DecayedUses>(m, "DecayedUses", "Uses of a layer's experts that fade; see decayed_uses.h.")
      .def(nb::init<int, double>(), "num_experts"_a, "half_life"_a)
      .def("use", &DecayedUses::use, "experts"_a)
      .def("value", &DecayedUses::value, "expert"_a)
      .def("set_resident", &DecayedUses::set_resident, "expert"_a, "is_resident"_a)
      .def("lowest", &DecayedUses::lowest, "kept"_a)
      .def("ranks", &DecayedUses::ranks, "experts"_a);
  nb::class_<Odds>(m, "Odds", "What guesses at experts are worth; see odds.h.")
      .def(nb::init<int, int, std::vector<Curve>, double, double, double>(), "num_layers"_a, "num_experts"_a, "curves"_a,
           "half_life"_a, "least_heat"_a, "learning_rate"_a)
      .def("weigh", [](Odds& odds, int layer, int distance, const std::vector<int>& ranked, const std::vector<float>& margins,
                       const nb::bytearray& is_here, int per_token, double threshold) {
        for (int expert : ranked)
          if (static_cast<std::size_t>(expert) >= is_here.size()) throw std::out_of_range("no such expert");
        Odds::Worthy found = odds.weigh(layer, distance, ranked, margins, static_cast<const std::uint8_t*>(is_here.data()),
                                        per_token, threshold);
        return nb::make_tuple(std::move(found.loads), found.num_dropped);
      }, "layer"_a, "distance"_a, "ranked"_a, "margins"_a, "is_here"_a, "per_token"_a, "threshold"_a)
      .def("learn", &Odds::learn, "layer"_a, "needed"_a)
      .def("forget", &Odds::forget);
}
