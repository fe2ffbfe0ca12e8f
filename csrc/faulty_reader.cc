#include "faulty_reader.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

namespace tidegate {
namespace {

// splitmix64: the delay of a read depends on the seed and its number only.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

std::int64_t FaultyReader::pass_gate(const ReadRecord& record) {
  std::unique_lock lock(mutex_);
  ++waiting_;
  gate_moved_.wait(lock, [this] { return !gate_closed_ || permits_ > 0; });
  --waiting_;
  if (gate_closed_) --permits_;
  log_.push_back(record);
  return static_cast<std::int64_t>(log_.size()) - 1;
}

std::int64_t FaultyReader::read(int fd, bool direct, std::uint8_t* dest, std::int64_t nbytes, std::int64_t offset) {
  const std::int64_t number = pass_gate({offset, nbytes, direct});
  if (faults_.max_delay_us > 0) {
    const auto delay = mix(faults_.seed ^ static_cast<std::uint64_t>(number)) % faults_.max_delay_us;
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
  }
  if (direct && faults_.refuse_direct) return -EINVAL;
  if (number == faults_.fail_at) return -EIO;
  if (faults_.end_at >= 0 && number > faults_.end_at) return 0;
  const bool half = number == faults_.short_at || number == faults_.end_at;
  return posix_.read(fd, direct, dest, half ? std::max<std::int64_t>(nbytes / 8192 * 4096, 1) : nbytes, offset);
}

void FaultyReader::close_gate() {
  std::lock_guard lock(mutex_);
  gate_closed_ = true;
  permits_ = 0;
}

void FaultyReader::allow(std::int64_t reads) {
  std::lock_guard lock(mutex_);
  permits_ += reads;
  gate_moved_.notify_all();
}

void FaultyReader::open_gate() {
  std::lock_guard lock(mutex_);
  gate_closed_ = false;
  gate_moved_.notify_all();
}

std::int64_t FaultyReader::num_waiting() const {
  std::lock_guard lock(mutex_);
  return waiting_;
}

std::vector<ReadRecord> FaultyReader::log() const {
  std::lock_guard lock(mutex_);
  return log_;
}

}  // namespace tidegate
