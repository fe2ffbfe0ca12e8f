#include "pack.h"

#include <algorithm>
#include <cstring>

#include "half.h"
#include "quantize.h"

namespace tidegate {

extern const QuantizeGroupFn quantize_group_portable;
#if defined(__x86_64__)
extern const QuantizeGroupFn quantize_group_avx2;
#endif

QuantizeGroupFn quantize_group_fn(Isa isa) {
#if defined(__x86_64__)
  if (isa != Isa::portable) return quantize_group_avx2;
#endif
  (void)isa;
  return quantize_group_portable;
}

namespace {

// The codes of one group of a panel, before they are interleaved. Rows and inputs that are padding hold the offset.
struct GroupCodes {
  std::uint8_t code[kPanelRows][kMaxGroup];
  GroupHeader header[kPanelRows];

  explicit GroupCodes(const WeightFormat& format) {
    std::memset(code, format.code_offset(), sizeof code);
    std::memset(header, 0, sizeof header);
  }

  void write(const WeightFormat& format, std::uint8_t* out) const {
    for (int r = 0; r < kPanelRows; ++r) {
      std::memcpy(out + 2 * r, &header[r].scale, 2);
      if (format.has_min) std::memcpy(out + 32 + 2 * r, &header[r].min, 2);
    }
    out += format.header_bytes();
    if (format.kind == Kind::int8) {
      for (int i = 0; i < format.group; i += 4)
        for (int r = 0; r < kPanelRows; ++r, out += 4) std::memcpy(out, &code[r][i], 4);
      return;
    }
    for (int i = 0; i < format.group; i += 8)
      for (int r = 0; r < kPanelRows; ++r, out += 4) {
        std::uint32_t low, high;
        std::memcpy(&low, &code[r][i], 4);
        std::memcpy(&high, &code[r][i + 4], 4);
        low |= high << 4;
        std::memcpy(out, &low, 4);
      }
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

template <class FillRow>
void pack_integer_panel(int rows, std::int64_t k, const WeightFormat& format, std::uint8_t* out, FillRow&& fill_row) {
  for (std::int64_t first = 0; first < k; first += format.group, out += format.group_bytes()) {
    const int count = static_cast<int>(std::min<std::int64_t>(format.group, k - first));
    GroupCodes group(format);
    for (int r = 0; r < rows; ++r) fill_row(group, r, first, count);
    group.write(format, out);
  }
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
  const QuantizeGroupFn quantize = quantize_group_fn(available_isas().front());
  for_each_panel(pool, n, [&](std::int64_t panel, int rows) {
    const float* const first_row = w + panel * kPanelRows * k;
    std::uint8_t* const target = out + panel * panel_bytes;
    if (!format.is_integer()) return pack_float_panel(first_row, rows, k, format, target);
    pack_integer_panel(rows, k, format, target, [&](GroupCodes& group, int r, std::int64_t first, int count) {
      group.header[r] = quantize(format, first_row + r * k + first, count, group.code[r]);
    });
  });
}

void pack_codes(Pool& pool, const CodedMatrix& coded, std::int64_t n, std::int64_t k, const WeightFormat& format,
                std::uint8_t* out) {
  const std::int64_t panel_bytes = format.panel_bytes(k), groups = format.padded_k(k) / format.group;
  for_each_panel(pool, n, [&](std::int64_t panel, int rows) {
    pack_integer_panel(rows, k, format, out + panel * panel_bytes, [&](GroupCodes& group, int r, std::int64_t first, int count) {
      const std::int64_t row = panel * kPanelRows + r, at = row * groups + first / format.group;
      std::memcpy(group.code[r], coded.codes + row * k + first, static_cast<std::size_t>(count));
      group.header[r] = {coded.scales[at], format.has_min ? coded.mins[at] : std::uint16_t{0}};
    });
  });
}

void unpack_row(const PackedMatrix& packed, std::int64_t row, float* out) {
  const WeightFormat& format = packed.format;
  const std::uint8_t* at = packed.data + row / kPanelRows * packed.panel_bytes();
  const int r = static_cast<int>(row % kPanelRows);
  if (!format.is_integer()) {
    for (std::int64_t i = 0; i < packed.k; ++i) {
      std::uint16_t bits;
      if (format.kind == Kind::f32) {
        std::memcpy(out + i, at + (i * kPanelRows + r) * 4, 4);
      } else {
        std::memcpy(&bits, at + (i / 2 * kPanelRows + r) * 4 + i % 2 * 2, 2);
        out[i] = bf16_to_float(bits);
      }
    }
    return;
  }
  const int offset = format.code_offset();
  for (std::int64_t first = 0; first < packed.k; first += format.group, at += format.group_bytes()) {
    GroupHeader header{};
    std::memcpy(&header.scale, at + 2 * r, 2);
    if (format.has_min) std::memcpy(&header.min, at + 32 + 2 * r, 2);
    const float scale = half_to_float(header.scale), min = half_to_float(header.min);
    const std::uint8_t* const codes = at + format.header_bytes() + 4 * r;
    const int count = static_cast<int>(std::min<std::int64_t>(format.group, packed.k - first));
    for (int i = 0; i < count; ++i) {
      int code;
      if (format.kind == Kind::int8) {
        code = codes[i / 4 * 64 + i % 4];
      } else {
        const int byte = codes[i / 8 * 64 + i % 4];
        code = i % 8 < 4 ? byte & 15 : byte >> 4;
        if (format.kind == Kind::mxfp4) code = kMxfp4Values[code];
      }
      const float value = static_cast<float>(code - offset) * scale;
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
