// Which instruction set the kernels use. Every *_amx.cc, *_avx512.cc, *_avx2.cc and *_portable.cc exports one table of functions.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

namespace tidegate {

// amx: products of tiles of more than a few tokens in the matrix unit, everything else as avx512.
enum class Isa { portable, avx2, avx512, amx };

const char* isa_name(Isa isa);
// The instruction set of that name; nullopt for an unknown one. Says nothing about this processor.
std::optional<Isa> parse_isa(std::string_view name);
// What this processor and this build can run, best first. Never empty.
std::vector<Isa> available_isas();

}  // namespace tidegate
