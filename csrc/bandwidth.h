// What reading memory costs at best: the ceiling of every product with few tokens.
#pragma once
#include <cstdint>

#include "pool.h"

namespace tidegate {

// Reads every whole cache line once, with all threads; the sum of its 64-bit words, so that the reads cannot be optimised away.
std::uint64_t read_all(Pool& pool, const std::uint8_t* memory, std::int64_t bytes);

// Seconds of the fastest of `rounds` such passes with `threads` threads. Meaningful for memory far larger than the caches.
double fastest_read_s(const std::uint8_t* memory, std::int64_t bytes, int threads, int rounds);

}  // namespace tidegate
