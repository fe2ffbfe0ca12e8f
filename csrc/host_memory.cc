#include "host_memory.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace tidegate {
namespace {

constexpr std::int64_t kHugePageBytes = 2 << 20;
constexpr std::int64_t kStepBytes = 64 << 20;

int populate_step(std::uint8_t* begin, std::int64_t nbytes) {
  while (::madvise(begin, static_cast<std::size_t>(nbytes), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) {  // an older kernel: touch
      const long page = ::sysconf(_SC_PAGESIZE);
      for (std::int64_t i = 0; i < nbytes; i += page) reinterpret_cast<volatile std::uint8_t*>(begin)[i] = 0;
      return 0;
    }
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
  return 0;
}

}  // namespace

int populate(std::uint8_t* begin, std::int64_t nbytes, int num_threads) {
  // Refused where huge pages are off: no matter. The tail must not get one, or more would be present than was asked for.
  const std::int64_t huge_bytes = nbytes / kHugePageBytes * kHugePageBytes;
  ::madvise(begin, static_cast<std::size_t>(huge_bytes), MADV_HUGEPAGE);
  ::madvise(begin + huge_bytes, static_cast<std::size_t>(nbytes - huge_bytes), MADV_NOHUGEPAGE);
  std::atomic<std::int64_t> next{0};
  std::atomic<int> error{0};
  auto work = [&] {
    for (std::int64_t at = next.fetch_add(kStepBytes); at < nbytes && error == 0; at = next.fetch_add(kStepBytes)) {
      const int failed = populate_step(begin + at, std::min(kStepBytes, nbytes - at));
      if (failed != 0) error = failed;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return error;
}

void trim_heap() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace tidegate
