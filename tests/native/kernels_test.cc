// Products and experts on every instruction set and format, from blocks of exactly the right size: the same bits
// everywhere, nothing read or written beside them, and experts that become ready in another thread.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "linear.h"
#include "moe.h"
#include "pack.h"
#include "quantize.h"
#include "testing.h"

namespace {

using namespace tidegate;

std::mt19937 random_bits(7);

std::vector<float> random_floats(std::int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& x : out) x = normal(random_bits);
  return out;
}

std::vector<WeightFormat> formats() {
  std::vector<WeightFormat> out = {*WeightFormat::make("f32", 0, false), *WeightFormat::make("bf16", 0, false),
                                   *WeightFormat::make("mxfp4", 32, false)};
  for (const char* kind : {"int8", "int4"})
    for (int group : {16, 32, 64, 128})
      for (bool has_min : {false, true}) out.push_back(*WeightFormat::make(kind, group, has_min));
  for (int group : {32, 64, 128}) out.push_back(*WeightFormat::make("int4", group, false, true));
  return out;
}

struct FreeBytes {
  void operator()(std::uint8_t* p) const { std::free(p); }
};
using Block = std::unique_ptr<std::uint8_t, FreeBytes>;

Block aligned_block(std::int64_t bytes) {
  return Block(static_cast<std::uint8_t*>(std::aligned_alloc(64, static_cast<std::size_t>(align_up(bytes, 64)))));
}

struct OneCompute {
  explicit OneCompute(Isa isa, int threads) : memory(aligned_block(kBytes)), compute(threads, memory.get(), kBytes, isa) {}
  static constexpr std::size_t kBytes = 4 << 20;
  Block memory;
  Compute compute;
};

std::vector<std::unique_ptr<OneCompute>> all_computes() {
  std::vector<std::unique_ptr<OneCompute>> out;
  for (Isa isa : available_isas())
    for (int threads : {1, 3}) out.push_back(std::make_unique<OneCompute>(isa, threads));
  return out;
}

void test_linear(const WeightFormat& format, std::int64_t tokens, std::int64_t n, std::int64_t k) {
  Pool pool(1);
  const std::vector<float> w = random_floats(n * k), bias = random_floats(n);
  std::vector<float> x = random_floats(tokens * k), first;
  std::vector<std::uint8_t> packed(static_cast<std::size_t>(format.packed_bytes(n, k)));
  pack(pool, w.data(), n, k, format, packed.data());
  for (const auto& one : all_computes()) {
    const Matrix out = linear(one->compute, {x.data(), tokens, k}, {packed.data(), format, n, k, bias.data()});
    const std::vector<float> got(out.data, out.data + tokens * n);
    if (first.empty()) first = got;
    check(std::memcmp(first.data(), got.data(), got.size() * sizeof(float)) == 0, "linear: the same bits everywhere");
  }
}

// Quantizing makes the same bits on every instruction set.
void test_quantizers(const WeightFormat& format) {
  for (int count : {1, format.group - 9, format.group}) {
    const std::vector<float> w = random_floats(count);
    std::vector<std::vector<std::uint8_t>> found;
    for (Isa isa : available_isas()) {
      const Quantizer& one = quantizer(isa);
      const float row_scale = one.row_scale(w.data(), count);
      std::vector<std::uint8_t> bits(static_cast<std::size_t>(count) + sizeof(float));
      const GroupHeader header = one.quantize_group(format, w.data(), count, row_scale, bits.data());
      std::memcpy(bits.data() + count, &row_scale, sizeof row_scale);
      for (int part : {int{header.scale}, int{header.min}, int{header.multiplier}})
        for (int shift : {0, 8}) bits.push_back(static_cast<std::uint8_t>(part >> shift));
      found.push_back(bits);
    }
    for (const auto& bits : found) check(bits == found[0], "quantizing: the same bits everywhere");
  }
}

// Slots that another thread makes ready, in a shuffled order.
class LateSlots final : public SlotSource {
 public:
  LateSlots(const std::vector<Block>& blobs, std::vector<int> order) : blobs_(blobs), ready_(blobs.size()) {
    thread_ = std::thread([this, order = std::move(order)] {
      for (int slot : order) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        ready_[static_cast<std::size_t>(slot)].store(1, std::memory_order_release);
      }
    });
  }
  ~LateSlots() override { thread_.join(); }
  const std::uint8_t* wait_ready(int slot) override {
    while (!is_ready(slot)) std::this_thread::yield();
    return blobs_[static_cast<std::size_t>(slot)].get();
  }
  bool is_ready(int slot) const override {
    return ready_[static_cast<std::size_t>(slot)].load(std::memory_order_acquire) != 0;
  }

 private:
  const std::vector<Block>& blobs_;
  std::vector<std::atomic<int>> ready_;
  std::thread thread_;
};

void test_moe(const WeightFormat& format, std::int64_t tokens) {
  constexpr std::int64_t kHidden = 40, kWidth = 56, kExperts = 5, kPerToken = 3;
  Pool pool(1);
  ExpertLayout layout{kHidden, kWidth, format, format, true, 0, 0, 0};
  layout.up_offset = align_up(format.packed_bytes(kWidth, kHidden), 64);
  layout.down_offset = 2 * layout.up_offset;
  layout.bias_offset = layout.down_offset + align_up(format.packed_bytes(kHidden, kWidth), 64);
  const std::int64_t bytes = layout.bias_offset + 2 * align_up(4 * kWidth, 64) + 4 * kHidden;
  std::vector<Block> blobs;
  for (int e = 0; e < kExperts; ++e) {
    blobs.push_back(aligned_block(bytes));
    std::uint8_t* const blob = blobs.back().get();
    const std::vector<float> w = random_floats(kWidth * kHidden), biases = random_floats((bytes - layout.bias_offset) / 4);
    pack(pool, w.data(), kWidth, kHidden, format, blob);
    pack(pool, w.data(), kWidth, kHidden, format, blob + layout.up_offset);
    pack(pool, w.data(), kHidden, kWidth, format, blob + layout.down_offset);
    std::memcpy(blob + layout.bias_offset, biases.data(), static_cast<std::size_t>(bytes - layout.bias_offset));
  }
  std::vector<float> x = random_floats(tokens * kHidden), first;
  const std::vector<float> weights = random_floats(tokens * kPerToken);
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens; ++t)
    for (int k = 0; k < kPerToken; ++k) ids.push_back(static_cast<std::int32_t>((t + 2 * k) % kExperts));
  std::vector<int> order = {0, 1, 2, 3, 4};
  for (const auto& one : all_computes()) {
    std::shuffle(order.begin(), order.end(), random_bits);
    LateSlots slots(blobs, order);
    MoeStep step(one->compute, {x.data(), tokens, kHidden}, ids.data(), weights.data(), kPerToken, layout, {});
    check(step.run({0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, slots) == -1, "moe: no load fails");
    const Matrix out = step.finish();
    const std::vector<float> got(out.data, out.data + tokens * kHidden);
    if (first.empty()) first = got;
    check(std::memcmp(first.data(), got.data(), got.size() * sizeof(float)) == 0, "moe: the same bits everywhere");
  }
}

}  // namespace

int main() {
  for (const WeightFormat& format : formats()) {
    if (format.is_integer()) test_quantizers(format);
    for (std::int64_t tokens : {1, 2, 3, 9}) test_linear(format, tokens, 37, 75);
    test_linear(format, 131, 16, 32);
    for (std::int64_t tokens : {1, 11}) test_moe(format, tokens);
  }
  std::puts("kernels: ok");
}
