// One positioned read of a file: the seam between the loader and the operating system, where tests inject faults.
#pragma once
#include <cstdint>

namespace tidegate {

class BlockReader {
 public:
  virtual ~BlockReader() = default;
  // Like pread: bytes read (fewer than asked is legal, 0 is the end of the file) or -errno. Called from many threads.
  // ``direct`` says that ``fd`` was opened with O_DIRECT.
  virtual std::int64_t read(int fd, bool direct, std::uint8_t* dest, std::int64_t nbytes, std::int64_t offset) = 0;
};

class PosixReader final : public BlockReader {
 public:
  std::int64_t read(int fd, bool direct, std::uint8_t* dest, std::int64_t nbytes, std::int64_t offset) override;
};

}  // namespace tidegate
