#include "block_reader.h"

#include <cerrno>
#include <unistd.h>

namespace tidegate {

std::int64_t PosixReader::read(int fd, bool /*direct*/, std::uint8_t* dest, std::int64_t nbytes, std::int64_t offset) {
  for (;;) {
    const ssize_t got = ::pread(fd, dest, static_cast<std::size_t>(nbytes), static_cast<off_t>(offset));
    if (got >= 0) return got;
    if (errno != EINTR) return -errno;
  }
}

}  // namespace tidegate
