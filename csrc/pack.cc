#include "pack.h"

#include <algorithm>
#include <cstring>

#include "half.h"
#include "quantize.h"

namespace tidegate {

namespace {

// The codes of one group of a panel, before they are interleaved. Rows and inputs that are padding hold the offset.
struct GroupCodes {
  std::uint8_t code[kPanelRows][kMaxGroup];
  GroupHeader header[kPanelRows];

  explicit GroupCodes(const WeightFormat& format) {
    std::memset(code, format.code_offset(), sizeof code);
    std::memset(header, 0, sizeof header);
  }

  void write_multipliers(std::uint8_t* out) const {
    for (int r = 0; r < kPanelRows; ++r) out[r] = static_cast<std::uint8_t>(header[r].multiplier);
  }

  // Returns what is behind the header.
  std::uint8_t* write_header(const WeightFormat& format, std::uint8_t* out) const {
    for (int r = 0; r < kPanelRows; ++r) {
      std::memcpy(out + 2 * r, &header[r].scale, 2);
      if (format.has_min) std::memcpy(out + 32 + 2 * r, &header[r].min, 2);
    }
    return out + format.header_bytes();
  }

  // Returns what is behind the codes.
  std::uint8_t* write_codes(const WeightFormat& format, std::uint8_t* out) const {
    if (format.kind == Kind::int8) {
      for (int i = 0; i < format.group; i += 4)
        for (int r = 0; r < kPanelRows; ++r, out += 4) std::memcpy(out, &code[r][i], 4);
      return out;
    }
    for (int i = 0; i < format.group; i += 8)
      for (int r = 0; r < kPanelRows; ++r, out += 4) {
        std::uint32_t low, high;
        std::memcpy(&low, &code[r][i], 4);
        std::memcpy(&high, &code[r][i + 4], 4);
        low |= high << 4;
        std::memcpy(out, &low, 4);
      }
    return out;
  }
};

void pack_float_panel(const float* w, int rows, std::int64_t k, const WeightFormat& format, std::uint8_t* out) {
  const std::int64_t padded_k = format.padded_k(k);
  std::memset(out, 0, static_cast<std::size_t>(format.panel_bytes(k)));
  for (std::int64_t i = 0; i < padded_k; ++i)
    for (int r = 0; r < rows && i < k; ++r) {
      const float value = w[r * k + i];
      if (format.kind == Kind::f32) {
        std::memcpy(out + (i * kPanelRows + r) * 4, &value, 4);
      } else {
        const std::uint16_t bits = float_to_bf16(value);
        std::memcpy(out + (i / 2 * kPanelRows + r) * 4 + i % 2 * 2, &bits, 2);
      }
    }
}

// Everything but row scales, whose place it returns.
template <class FillRow>
std::uint8_t* pack_integer_panel(int rows, std::int64_t k, const WeightFormat& format, std::uint8_t* out, FillRow&& fill_row) {
  std::uint8_t* multipliers = nullptr;
  for (std::int64_t g = 0; g < format.groups(k); ++g) {
    const std::int64_t first = g * format.group;
    const int count = static_cast<int>(std::min<std::int64_t>(format.group, k - first));
    GroupCodes group(format);
    for (int r = 0; r < rows; ++r) fill_row(group, r, first, count);
    if (format.two_level) {
      if (g % kMultiplierGroups == 0) {
        multipliers = out;
        std::memset(out, 0, kMultiplierBytes);
        out += kMultiplierBytes;
      }
      group.write_multipliers(multipliers + g % kMultiplierGroups * kPanelRows);
    } else {
      out = group.write_header(format, out);
    }
    out = group.write_codes(format, out);
  }
  return out;
}

template <class PackPanel>
void for_each_panel(Pool& pool, std::int64_t n, PackPanel&& pack_panel) {
  pool.parallel_for((n + kPanelRows - 1) / kPanelRows, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t panel = begin; panel < end; ++panel)
      pack_panel(panel, static_cast<int>(std::min<std::int64_t>(kPanelRows, n - panel * kPanelRows)));
  });
}

}  // namespace

void pack(Pool& pool, const float* w, std::int64_t n, std::int64_t k, const WeightFormat& format, std::uint8_t* out) {
  const std::int64_t panel_bytes = format.panel_bytes(k);
  const Quantizer& all = quantizer(available_isas().front());
  for_each_panel(pool, n, [&](std::int64_t panel, int rows) {
    const float* const first_row = w + panel * kPanelRows * k;
    std::uint8_t* const target = out + panel * panel_bytes;
    if (!format.is_integer()) return pack_float_panel(first_row, rows, k, format, target);
    float row_scales[kPanelRows] = {};
    for (int r = 0; r < rows && format.two_level; ++r) row_scales[r] = all.row_scale(first_row + r * k, k);
    std::uint8_t* const end =
        pack_integer_panel(rows, k, format, target, [&](GroupCodes& group, int r, std::int64_t first, int count) {
          group.header[r] = all.quantize_group(format, first_row + r * k + first, count, row_scales[r], group.code[r]);
        });
    if (format.two_level) std::memcpy(end, row_scales, sizeof row_scales);
  });
}

void pack_codes(Pool& pool, const CodedMatrix& coded, std::int64_t n, std::int64_t k, const WeightFormat& format,
                std::uint8_t* out) {
  const std::int64_t panel_bytes = format.panel_bytes(k), groups = format.groups(k);
  for_each_panel(pool, n, [&](std::int64_t panel, int rows) {
    pack_integer_panel(rows, k, format, out + panel * panel_bytes, [&](GroupCodes& group, int r, std::int64_t first, int count) {
      const std::int64_t row = panel * kPanelRows + r, at = row * groups + first / format.group;
      std::memcpy(group.code[r], coded.codes + row * k + first, static_cast<std::size_t>(count));
      group.header[r] = {coded.scales[at], format.has_min ? coded.mins[at] : std::uint16_t{0}, 0};
    });
  });
}

namespace {

void unpack_float_row(const PackedMatrix& packed, const std::uint8_t* panel, int r, float* out) {
  for (std::int64_t i = 0; i < packed.k; ++i) {
    std::uint16_t bits;
    if (packed.format.kind == Kind::f32) {
      std::memcpy(out + i, panel + (i * kPanelRows + r) * 4, 4);
    } else {
      std::memcpy(&bits, panel + (i / 2 * kPanelRows + r) * 4 + i % 2 * 2, 2);
      out[i] = bf16_to_float(bits);
    }
  }
}

// Code i of a group less the format's offset; `codes` is where the row's first ones are.
int signed_code(const WeightFormat& format, const std::uint8_t* codes, int i) {
  if (format.kind == Kind::int8) return codes[i / 4 * 64 + i % 4] - format.code_offset();
  const int byte = codes[i / 8 * 64 + i % 4], code = i % 8 < 4 ? byte & 15 : byte >> 4;
  return format.kind == Kind::mxfp4 ? kMxfp4Values[code] : code - format.code_offset();
}

void unpack_two_level_row(const PackedMatrix& packed, const std::uint8_t* panel, int r, float* out) {
  const WeightFormat& format = packed.format;
  float row_scale;
  std::memcpy(&row_scale, panel + packed.panel_bytes() - kPanelRows * sizeof(float) + 4 * r, 4);
  const std::uint8_t* multipliers = panel;
  for (std::int64_t g = 0; g < format.groups(packed.k); ++g, panel += kPanelRows * format.group / 2) {
    const std::int64_t first = g * format.group, in_block = g % kMultiplierGroups;
    if (in_block == 0) {
      multipliers = panel;
      panel += kMultiplierBytes;
    }
    const int multiplier = static_cast<std::int8_t>(multipliers[in_block * kPanelRows + r]);
    for (int i = 0; i < format.group && first + i < packed.k; ++i)
      out[first + i] = row_scale * static_cast<float>(multiplier * signed_code(format, panel + 4 * r, i));
  }
}

}  // namespace

void unpack_row(const PackedMatrix& packed, std::int64_t row, float* out) {
  const WeightFormat& format = packed.format;
  const std::uint8_t* at = packed.data + row / kPanelRows * packed.panel_bytes();
  const int r = static_cast<int>(row % kPanelRows);
  if (!format.is_integer()) return unpack_float_row(packed, at, r, out);
  if (format.two_level) return unpack_two_level_row(packed, at, r, out);
  const std::int64_t group_bytes = format.header_bytes() + std::int64_t{kPanelRows} * format.group * format.code_bits() / 8;
  for (std::int64_t first = 0; first < packed.k; first += format.group, at += group_bytes) {
    std::uint16_t scale_bits, min_bits = 0;
    std::memcpy(&scale_bits, at + 2 * r, 2);
    if (format.has_min) std::memcpy(&min_bits, at + 32 + 2 * r, 2);
    const float scale = half_to_float(scale_bits), min = half_to_float(min_bits);
    for (int i = 0; i < format.group && first + i < packed.k; ++i) {
      const float value = static_cast<float>(signed_code(format, at + format.header_bytes() + 4 * r, i)) * scale;
      out[first + i] = format.has_min ? value + min : value;
    }
  }
}

void unpack(Pool& pool, const PackedMatrix& packed, float* out) {
  for_each_panel(pool, packed.n, [&](std::int64_t panel, int rows) {
    for (std::int64_t row = panel * kPanelRows; row < panel * kPanelRows + rows; ++row)
      unpack_row(packed, row, out + row * packed.k);
  });
}

}  // namespace tidegate
