// How fast this machine reads memory: the ceiling of a decode step.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tidegate {

// Seconds of the fastest of `rounds` passes in which `threads` threads together read every byte once. Meaningful for
// memory far larger than the caches.
double fastest_read_s(const std::uint8_t* memory, std::size_t bytes, int threads, int rounds);

}  // namespace tidegate
