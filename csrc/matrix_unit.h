// The matrix unit of some x86 processors (AMX, int8): three tile registers with fixed roles. Included by kernels_amx.cc only.
//
//   sums [tokens][16 rows] int32 += inputs [tokens][count] int8 x weights [count / 4][16 rows][4] uint8
//
// A thread configures the unit before it uses it and releases it afterwards: nothing of it survives a call of a kernel.
// With TIDEGATE_EMULATE_MATRIX_UNIT the same functions are plain loops, for tests on other processors and under
// sanitizers, which do not see what tile instructions read and write.
#pragma once
#include <cstdint>
#include <cstring>

namespace tidegate {

struct MatrixUnit {
  static constexpr int kTokens = 16, kRows = 16, kInputs = 64;  // the most of each

#if defined(TIDEGATE_EMULATE_MATRIX_UNIT)
  struct Registers {
    int tokens, count;
    std::int32_t sums[kTokens][kRows];
    std::int8_t inputs[kTokens][kInputs];
    std::uint8_t weights[kInputs / 4][kRows][4];
  };
  inline static thread_local Registers registers;

  static void configure(int tokens, int count) { registers = {tokens, count, {}, {}, {}}; }
  static void release() { registers = {}; }
  static void clear_sums() { std::memset(registers.sums, 0, sizeof registers.sums); }
  static void load_inputs(const std::int8_t* rows, std::int64_t stride) {
    for (int m = 0; m < registers.tokens; ++m)
      std::memcpy(registers.inputs[m], rows + m * stride, static_cast<std::size_t>(registers.count));
  }
  static void load_weights(const std::uint8_t* codes) {
    std::memcpy(registers.weights, codes, static_cast<std::size_t>(16 * registers.count));
  }
  static void multiply() {
    for (int m = 0; m < registers.tokens; ++m)
      for (int i = 0; i < registers.count; ++i)
        for (int r = 0; r < kRows; ++r) registers.sums[m][r] += registers.inputs[m][i] * registers.weights[i / 4][r][i % 4];
  }
  static void store_sums(std::int32_t* sums) {
    std::memcpy(sums, registers.sums, static_cast<std::size_t>(registers.tokens) * sizeof registers.sums[0]);
  }
#else
  // Written out because GCC 12's functions for these instructions do not tell the compiler that they touch memory.
  // What LDTILECFG reads (Intel 64 and IA-32 manual, volume 1, chapter 18).
  struct alignas(64) Configuration {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
  };

  static void configure(int tokens, int count) {
    Configuration all;
    const auto set = [&all](int tile, int rows, int row_bytes) {
      all.rows[tile] = static_cast<std::uint8_t>(rows);
      all.row_bytes[tile] = static_cast<std::uint16_t>(row_bytes);
    };
    set(0, tokens, 4 * kRows);
    set(1, tokens, count);
    set(2, count / 4, 4 * kRows);
    asm volatile("ldtilecfg %0" : : "m"(all));
  }
  static void release() { asm volatile("tilerelease"); }
  static void clear_sums() { asm volatile("tilezero %tmm0"); }
  static void load_inputs(const std::int8_t* rows, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm1" : : "r"(rows), "r"(stride) : "memory");
  }
  static void load_weights(const std::uint8_t* codes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm2" : : "r"(codes), "r"(std::int64_t{4 * kRows}) : "memory");
  }
  static void multiply() { asm volatile("tdpbsud %tmm2, %tmm1, %tmm0"); }
  static void store_sums(std::int32_t* sums) {
    asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(sums), "r"(std::int64_t{4 * kRows}) : "memory");
  }
#endif
};

}  // namespace tidegate
