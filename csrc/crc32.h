// CRC-32 (IEEE 802.3, reflected polynomial 0xEDB88320): the same numbers as zlib's crc32.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tidegate {

// The checksum of what came before (0 at the start) continued over ``nbytes`` more.
std::uint32_t crc32(std::uint32_t crc, const std::uint8_t* data, std::size_t nbytes);

}  // namespace tidegate
