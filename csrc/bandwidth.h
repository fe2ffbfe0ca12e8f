// What reading memory costs at best: the ceiling of every product with few tokens.
#pragma once
#include <cstdint>

#include "pool.h"

namespace tidegate {

// Reads every byte once, with all threads; the sum of its 64-bit words, so that the reads cannot be optimised away.
std::uint64_t read_all(Pool& pool, const std::uint8_t* memory, std::int64_t bytes);

}  // namespace tidegate
