// The pool under many small jobs of changing size, from two callers: every index exactly once, nothing after the return.
#include "pool.h"
#include "testing.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

void hammer(tidegate::Pool& pool, unsigned seed, int jobs) {
  std::vector<int> hits;
  for (int job = 0; job < jobs; ++job) {
    seed = seed * 1664525u + 1013904223u;
    const std::int64_t count = (seed >> 8) % 200, grain = (seed >> 20) % 9;
    hits.assign(static_cast<std::size_t>(count), 0);
    std::atomic<int> outside{0};
    pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
      if (thread < 0 || thread >= pool.threads() || begin >= end) outside.fetch_add(1);
      for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
    });
    for (int h : hits) check(h == 1, "every index once");
    check(outside.load() == 0, "ranges and thread numbers");
    if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // let the workers fall asleep
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 8}) {
    tidegate::Pool pool(threads);
    std::thread other([&] { hammer(pool, 7, 3000); });
    hammer(pool, 99, 3000);
    other.join();
  }
  std::puts("pool: ok");
}
