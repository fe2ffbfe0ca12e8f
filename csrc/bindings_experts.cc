// Python bindings of the expert cache's counts, and of gates and the odds of their guesses. See bindings.cc for the rules.
#include "bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "gate.h"
#include "layer_book.h"
#include "layer_cache.h"
#include "odds.h"
#include "rank_counts.h"
#include "uses.h"

using namespace tidegate;

namespace {

void bind_odds(nb::module_& m) {
  nb::enum_<Worth>(m, "Worth")
      .value("DECAYED_USES", Worth::decayed_uses)
      .value("LAST_USE", Worth::last_use)
      .value("USES", Worth::uses)
      .value("USES_OVER_AGE", Worth::uses_over_age);
  nb::class_<Uses>(m, "Uses", "How much the experts of a layer were used; see uses.h.")
      .def(nb::init<Worth, int, double>(), "worth"_a, "num_experts"_a, "half_life"_a = 1.0)
      .def("use", &Uses::use, "experts"_a)
      .def("value", &Uses::value, "expert"_a)
      .def("set_resident", &Uses::set_resident, "expert"_a, "is_resident"_a)
      .def("lowest", &Uses::lowest, "kept"_a)
      .def("ranks", &Uses::ranks, "experts"_a);
  nb::class_<RankCounts>(m, "RankCounts", "How often experts of each rank were used; see rank_counts.h.")
      .def(nb::init<int, int, int>(), "num_layers"_a, "num_experts"_a, "sample_every"_a)
      .def("wants", &RankCounts::wants, "layer"_a)
      .def("observe", &RankCounts::observe, "layer"_a, "ranks"_a)
      .def("fade", &RankCounts::fade, "factor"_a)
      .def_prop_ro("counts", &RankCounts::counts)
      .def_prop_ro("most_needed", &RankCounts::most_needed)
      .def_prop_ro("looks", &RankCounts::looks);
  nb::class_<LayerBook>(m, "LayerBook", "Which expert of a layer is in which slot; see layer_book.h.")
      .def(nb::init<int, int, int>(), "num_experts"_a, "first_slot"_a, "capacity"_a)
      .def_prop_ro("num_free", &LayerBook::num_free)
      .def_prop_ro("num_pinned", &LayerBook::num_pinned)
      .def_prop_ro("capacity", &LayerBook::capacity)
      .def_prop_ro("has_pending", &LayerBook::has_pending)
      .def("slot_of", &LayerBook::slot_of, "expert"_a)
      .def("is_here", &LayerBook::is_here, "expert"_a)
      .def("is_unused", &LayerBook::is_unused, "expert"_a)
      .def("residents", &LayerBook::residents)
      .def("pinned", &LayerBook::pinned)
      .def("insert", &LayerBook::insert, "expert"_a, "is_unused"_a)
      .def("use", &LayerBook::use, "expert"_a)
      .def("pin", &LayerBook::pin, "expert"_a)
      .def("unpin", &LayerBook::unpin, "expert"_a)
      .def("drop", &LayerBook::drop, "expert"_a)
      .def("give_slot", &LayerBook::give_slot)
      .def("take_slot", &LayerBook::take_slot, "slot"_a)
      .def("take_pending", &LayerBook::take_pending);
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
      .def_ro("num_worthy", &Odds::num_worthy)
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
      .def("__init__", [](Sight* self, Odds& odds, int layer, Gate* start, Gate* before, Gate* next, LayerCache& here,
                          LayerCache* there) {
        if (next != nullptr && there == nullptr) throw std::invalid_argument("a guess at the next layer wants its cache");
        new (self) Sight{&odds, layer, start, before, next, &here, there};
      }, "odds"_a, "layer"_a, "start"_a.none(), "before"_a.none(), "next"_a.none(), "here"_a, "there"_a.none(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
           nb::keep_alive<1, 8>())
      .def("at_start", &Sight::at_start, "x"_a)
      .def("after_route", [](const Sight& sight, const Matrix& x, const std::vector<int>& needed, const F32Vector& heard) {
        sight.after_route(x, needed, heard.data());
      }, "x"_a, "needed"_a, "heard_E"_a.noconvert());
}

void bind_caches(nb::module_& m) {
  nb::class_<CacheCounts>(m, "CacheCounts", "Counters of experts/base.py, and time; see layer_cache.h.")
      .def(nb::init<>())
      .def_ro("visit_ns", &CacheCounts::visit_ns)
      .def_ro("guess_ns", &CacheCounts::guess_ns)
      .def("take", [](CacheCounts& c) {
        const auto out = nb::make_tuple(c.demand_hits, c.prefetch_hits, c.misses, c.evictions, c.prefetch_issued, c.prefetch_wasted,
                                        c.prefetch_dropped, c.prefetch_late);
        const std::int64_t visit_ns = c.visit_ns, guess_ns = c.guess_ns;
        c = {};
        c.visit_ns = visit_ns;
        c.guess_ns = guess_ns;
        return out;
      }, "In the order of CacheCounters, since the last call.");
  nb::class_<ExpertLoads>(m, "ExpertLoads", "Where every expert is in the store's files; see layer_cache.h.")
      .def(nb::init<Loader&>(), "loader"_a, nb::keep_alive<1, 2>())
      .def("add_layer", [](ExpertLoads& loads, const std::vector<std::tuple<int, std::int64_t, std::int64_t, std::uint32_t>>& blobs) {
        std::vector<LoadRequest> experts;
        for (const auto& [file, offset, nbytes, crc] : blobs)
          experts.push_back({file, offset, nbytes, crc, true, loads.num_layers(), static_cast<int>(experts.size())});
        loads.add_layer(std::move(experts));
      }, "blobs"_a, "(file, offset, bytes, crc32) of the next layer's experts");
  nb::class_<LayerCache>(m, "LayerCache", "What decode steps do with a layer's slots; see layer_cache.h.")
      .def("__init__", [](LayerCache* self, int layer, LayerBook& book, ExpertLoads& loads, CacheCounts& counts, Uses* uses,
                          RankCounts* ranks, double always_used) {
        new (self) LayerCache({layer, &book, &loads, &counts, uses, ranks, always_used});
      }, "layer"_a, "book"_a, "loads"_a, "counts"_a, "uses"_a.none(), "ranks"_a.none(), "always_used"_a,
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>())
      .def("serves", &LayerCache::serves, "needed"_a, "num_rows"_a)
      .def("visit", &LayerCache::visit, "needed"_a)
      .def("leave", &LayerCache::leave, "needed"_a)
      .def("cancel_refuted", &LayerCache::cancel_refuted);
}

}  // namespace

void bind_experts(nb::module_& m) {
  bind_odds(m);
  bind_caches(m);
  bind_gates(m);
}
