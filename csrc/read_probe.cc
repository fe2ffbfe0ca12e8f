#include "read_probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>

#include "pool.h"

namespace tidegate {
namespace {

constexpr std::int64_t kBlockBytes = 256, kGrainBlocks = 512;
constexpr std::ptrdiff_t kAheadBytes = 4096;

std::uint64_t sum_block(const std::uint8_t* block) {
  std::uint64_t words[kBlockBytes / 8], sum = 0;
  std::memcpy(words, block, sizeof words);
  for (std::ptrdiff_t line = 0; line < kBlockBytes; line += 64) __builtin_prefetch(block + kAheadBytes + line);
  for (const std::uint64_t word : words) sum += word;
  return sum;
}

}  // namespace

double fastest_read_s(const std::uint8_t* memory, std::size_t bytes, int threads, int rounds) {
  Pool pool(threads);
  std::atomic<std::uint64_t> total{0};  // used, so that no read can be left out
  double best_s = std::numeric_limits<double>::infinity();
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(static_cast<std::int64_t>(bytes) / kBlockBytes, kGrainBlocks, [&](std::int64_t begin, std::int64_t end, int) {
      std::uint64_t sum = 0;
      for (std::int64_t block = begin; block < end; ++block) sum += sum_block(memory + block * kBlockBytes);
      total.fetch_add(sum, std::memory_order_relaxed);
    });
    best_s = std::min(best_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best_s;
}

}  // namespace tidegate
