#include "format.h"

namespace tidegate {

std::optional<WeightFormat> WeightFormat::make(std::string_view kind, int group, bool has_min, bool two_level) {
  const bool good_group = group == 16 || group == 32 || group == 64 || group == 128;
  if (two_level) {
    if (kind != "int4" || !good_group || group == 16 || has_min) return std::nullopt;
    return WeightFormat{Kind::int4, group, false, true};
  }
  if (kind == "f32" && group == 0 && !has_min) return WeightFormat{Kind::f32, 0, false, false};
  if (kind == "bf16" && group == 0 && !has_min) return WeightFormat{Kind::bf16, 0, false, false};
  if (kind == "int8" && good_group) return WeightFormat{Kind::int8, group, has_min, false};
  if (kind == "int4" && good_group) return WeightFormat{Kind::int4, group, has_min, false};
  if (kind == "mxfp4" && group == 32 && !has_min) return WeightFormat{Kind::mxfp4, 32, false, false};
  return std::nullopt;
}

}  // namespace tidegate
