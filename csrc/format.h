// Packed weight formats: the C++ side of src/tidegate/quant/formats.py, which specifies them to the byte.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace tidegate {

enum class Kind { f32, bf16, int8, int4, mxfp4 };

constexpr int kPanelRows = 16;
// The largest group of inputs that shares a scale.
constexpr int kMaxGroup = 128;
// Two-level scales: groups whose multipliers lie together, in one cache line in front of the groups' codes.
constexpr int kMultiplierGroups = 4;
constexpr int kMultiplierBytes = kMultiplierGroups * kPanelRows;

constexpr std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

struct WeightFormat {
  Kind kind = Kind::f32;
  int group = 0;  // 0 for f32 and bf16
  bool has_min = false;
  bool two_level = false;  // int8 multipliers under one float32 scale a row

  // The format of those parts; nullopt if there is none.
  static std::optional<WeightFormat> make(std::string_view kind, int group, bool has_min, bool two_level = false);

  bool is_integer() const { return group > 0; }
  int k_multiple() const { return group > 0 ? group : kind == Kind::bf16 ? 2 : 1; }
  std::int64_t padded_k(std::int64_t k) const { return align_up(k, k_multiple()); }
  int code_bits() const { return kind == Kind::f32 ? 32 : kind == Kind::bf16 ? 16 : kind == Kind::int8 ? 8 : 4; }
  // What is subtracted from a code before scaling.
  int code_offset() const { return has_min ? 0 : kind == Kind::int8 ? 128 : kind == Kind::int4 ? 8 : 0; }
  std::int64_t groups(std::int64_t k) const { return is_integer() ? padded_k(k) / group : 0; }
  // Bytes right in front of a group's codes: 16 float16 scales, then 16 minima.
  int header_bytes() const { return group == 0 || two_level ? 0 : has_min ? 64 : 32; }
  // Lines of multipliers in a panel.
  std::int64_t multiplier_lines(std::int64_t k) const {
    return two_level ? (groups(k) + kMultiplierGroups - 1) / kMultiplierGroups : 0;
  }
  std::int64_t panel_bytes(std::int64_t k) const {
    const std::int64_t row_scale_bytes = two_level ? kPanelRows * sizeof(float) : 0;
    return padded_k(k) * kPanelRows * code_bits() / 8 + groups(k) * header_bytes() + multiplier_lines(k) * kMultiplierBytes +
           row_scale_bytes;
  }
  std::int64_t packed_bytes(std::int64_t n, std::int64_t k) const {
    return align_up(n, kPanelRows) / kPanelRows * panel_bytes(k);
  }
};

constexpr std::int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A packed [n, k] weight that somebody else owns, with an optional bias [n].
struct PackedMatrix {
  const std::uint8_t* data = nullptr;
  WeightFormat format;
  std::int64_t n = 0, k = 0;
  const float* bias = nullptr;
  // Integer formats only: inputs are taken as int8 codes and, in a second row, as int8 codes of what those leave.
  bool wide_inputs = false;

  std::int64_t panels() const { return (n + kPanelRows - 1) / kPanelRows; }
  std::int64_t panel_bytes() const { return format.panel_bytes(k); }
};

}  // namespace tidegate
