#include "moe_layer.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "clock.h"

namespace tidegate {
namespace {

// The experts that were chosen, ascending.
std::vector<int> distinct(const std::vector<std::int32_t>& ids, int num_experts) {
  std::vector<std::uint64_t> is_chosen(static_cast<std::size_t>(num_experts + 63) / 64);
  for (const std::int32_t id : ids) is_chosen[static_cast<std::size_t>(id) / 64] |= std::uint64_t{1} << id % 64;
  std::vector<int> out;
  out.reserve(std::min(ids.size(), static_cast<std::size_t>(num_experts)));
  for (std::size_t i = 0; i < is_chosen.size(); ++i)
    for (std::uint64_t rest = is_chosen[i]; rest != 0; rest &= rest - 1) out.push_back(static_cast<int>(64 * i) + std::countr_zero(rest));
  return out;
}

// A visit of a cache: the experts are pinned until its end, whatever happens before. What it costs is counted, from `start_ns` on.
class Visit {
 public:
  Visit(LayerCache& cache, const std::vector<int>& needed, std::int64_t start_ns) : cache_(cache), needed_(needed) {
    cache.visit(needed);
    cache.counts().visit_ns += now_ns() - start_ns;
  }
  ~Visit() {
    const std::int64_t start_ns = now_ns();
    cache_.leave(needed_);
    cache_.counts().visit_ns += now_ns() - start_ns;
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  LayerCache& cache_;
  const std::vector<int>& needed_;
};

// What the sight makes of the router's choice: odds follow it, and experts of the next layer are loaded.
void look_ahead(const Sight& sight, LayerCache& cache, const Routed& routed, const float* said) {
  const std::int64_t start_ns = now_ns();
  cache.cancel_refuted();
  sight.after_route(routed.normed, routed.needed, said);
  cache.counts().guess_ns += now_ns() - start_ns;
}

}  // namespace

Routed run_moe(Compute& compute, const Matrix& x, const MoeLayer& layer, LayerCache& cache, const Sight* sight) {
  const RouterParams& router = layer.router;
  if (cache.book().num_experts() != router.num_experts) throw std::invalid_argument("a cache of as many experts is needed");
  Routed r;
  r.normed = norm(compute, x, layer.norm);
  r.ids.resize(static_cast<std::size_t>(x.rows * router.top_k));
  r.weights.resize(r.ids.size());
  std::vector<float> said(sight != nullptr ? static_cast<std::size_t>(router.num_experts) : 0);
  route(compute, r.normed, router, r.ids.data(), r.weights.data(), sight != nullptr ? said.data() : nullptr);
  const std::int64_t routed_ns = now_ns();
  r.needed = distinct(r.ids, router.num_experts);
  if (cache.serves(r.needed, x.rows)) {
    const Visit visit(cache, r.needed, routed_ns);
    if (sight != nullptr) look_ahead(*sight, cache, r, said.data());
    if (layer.shared_gate_up && layer.shared_down)
      r.shared = gated_mlp(compute, r.normed, *layer.shared_gate_up, *layer.shared_down, layer.activation);
    MoeStep step(compute, r.normed, r.ids.data(), r.weights.data(), router.top_k, layer.layout, layer.activation);
    std::vector<int> slots;
    for (const int expert : r.needed) slots.push_back(cache.book().slot_of(expert));
    r.failed_slot = step.run(r.needed, slots, cache.source());
    if (r.failed_slot < 0) r.out = step.finish();
  }
  return r;
}

}  // namespace tidegate
