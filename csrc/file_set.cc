#include "file_set.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <system_error>
#include <unistd.h>

namespace tidegate {

FileSet::FileSet(const std::vector<std::string>& paths, std::shared_ptr<BlockReader> reader, bool page_cache)
    : reader_(std::move(reader)), page_cache_(page_cache) {
  for (const std::string& path : paths) {
    auto file = std::make_unique<File>();
    file->path = path;
    file->buffered_fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file->buffered_fd < 0) {
      const int error = errno;
      close_all();
      throw std::system_error(error, std::generic_category(), path);
    }
    if (!page_cache_) file->direct_fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    file->direct.store(file->direct_fd >= 0, std::memory_order_relaxed);
    files_.push_back(std::move(file));
  }
}

FileSet::~FileSet() { close_all(); }

void FileSet::close_all() {
  for (const auto& file : files_) {
    if (file->direct_fd >= 0) ::close(file->direct_fd);
    ::close(file->buffered_fd);
  }
  files_.clear();
}

ReadResult FileSet::read(int index, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest) {
  File& file = *files_[index];
  ReadResult result;
  const bool aligned = offset % kDirectAlignment == 0 && reinterpret_cast<std::uintptr_t>(dest) % kDirectAlignment == 0;
  if (aligned && file.direct.load(std::memory_order_relaxed)) {
    result = read_direct(file, offset, nbytes - nbytes % kDirectAlignment, dest);
    if (result.error == EINVAL) {
      file.direct.store(false, std::memory_order_relaxed);
      result.error = 0;
    }
  }
  if (result.error != 0 || result.got == nbytes) return result;
  const ReadResult rest = read_buffered(file, offset + result.got, nbytes - result.got, dest + result.got);
  return {result.got + rest.got, rest.error};
}

ReadResult FileSet::read_chunked(int file, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest,
                                 std::int64_t chunk_bytes) {
  ReadResult total;
  while (total.got < nbytes) {
    const std::int64_t wanted = std::min(chunk_bytes, nbytes - total.got);
    const ReadResult result = read(file, offset + total.got, wanted, dest + total.got);
    total.got += result.got;
    total.error = result.error;
    if (result.got != wanted) break;
  }
  return total;
}

// Stops early at an unaligned short read, since O_DIRECT cannot go on from there.
ReadResult FileSet::read_direct(File& file, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest) {
  ReadResult result;
  while (result.got < nbytes && result.got % kDirectAlignment == 0) {
    const std::int64_t n =
        reader_->read(file.direct_fd, true, dest + result.got, nbytes - result.got, offset + result.got);
    if (n < 0) result.error = static_cast<int>(-n);
    if (n <= 0) return result;
    result.got += n;
  }
  return result;
}

ReadResult FileSet::read_buffered(File& file, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest) {
  ReadResult result;
  while (result.got < nbytes) {
    const std::int64_t n =
        reader_->read(file.buffered_fd, false, dest + result.got, nbytes - result.got, offset + result.got);
    if (n < 0) result.error = static_cast<int>(-n);
    if (n <= 0) break;
    result.got += n;
  }
  if (!page_cache_) {
    // Whole pages only: a page that the range merely touches would otherwise stay cached.
    const std::int64_t begin = offset - offset % kDirectAlignment;
    const std::int64_t end = (offset + result.got + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    ::posix_fadvise(file.buffered_fd, begin, end - begin, POSIX_FADV_DONTNEED);
  }
  return result;
}

}  // namespace tidegate
