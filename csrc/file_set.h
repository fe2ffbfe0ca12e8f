// The files that experts and dense weights are read from, each open for O_DIRECT and for buffered reads.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "block_reader.h"

namespace tidegate {

constexpr std::int64_t kDirectAlignment = 4096;

// ``got`` bytes arrived; ``error`` is an errno, or 0 with got < asked at the end of the file.
struct ReadResult {
  std::int64_t got = 0;
  int error = 0;
};

class FileSet {
 public:
  // Opens every file for reading; throws std::system_error whose what() begins with the path. With ``page_cache`` all
  // reads go through the kernel's cache and stay there; without it none does (O_DIRECT, or buffered and dropped behind).
  FileSet(const std::vector<std::string>& paths, std::shared_ptr<BlockReader> reader, bool page_cache);
  ~FileSet();
  FileSet(const FileSet&) = delete;
  FileSet& operator=(const FileSet&) = delete;

  // Reads the whole range or says where it stopped. Direct where offset and dest are 4096-aligned (a ragged tail is read
  // buffered) and the file system takes it; a file that refuses with EINVAL is read buffered from then on. Thread-safe.
  ReadResult read(int file, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest);

  // The same in pieces of at most ``chunk_bytes``, so that no single request occupies the disk for long.
  ReadResult read_chunked(int file, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest,
                          std::int64_t chunk_bytes);

  int size() const { return static_cast<int>(files_.size()); }
  const std::string& path(int file) const { return files_[file]->path; }
  bool is_direct(int file) const { return files_[file]->direct.load(std::memory_order_relaxed); }

 private:
  struct File {
    std::string path;
    int direct_fd = -1;
    int buffered_fd = -1;
    std::atomic<bool> direct{false};
  };

  ReadResult read_direct(File& file, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest);
  ReadResult read_buffered(File& file, std::int64_t offset, std::int64_t nbytes, std::uint8_t* dest);
  void close_all();

  std::vector<std::unique_ptr<File>> files_;
  std::shared_ptr<BlockReader> reader_;
  const bool page_cache_;
};

}  // namespace tidegate
