// A BlockReader that misbehaves on purpose. Only tests construct one.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "block_reader.h"

namespace tidegate {

// Reads are numbered from 0 in the order in which they start; -1 switches a fault off.
struct Faults {
  std::uint64_t seed = 0;
  std::int64_t max_delay_us = 0;  // every read sleeps a seeded random time below this
  std::int64_t fail_at = -1;      // this read returns -EIO
  std::int64_t short_at = -1;     // this read returns half; the rest can be read afterwards
  std::int64_t end_at = -1;       // this read returns half, and every later read returns 0, as in a truncated file
  bool refuse_direct = false;     // O_DIRECT reads return -EINVAL
};

struct ReadRecord {
  std::int64_t offset;
  std::int64_t nbytes;
  bool direct;
};

class FaultyReader final : public BlockReader {
 public:
  explicit FaultyReader(const Faults& faults) : faults_(faults) {}
  std::int64_t read(int fd, bool direct, std::uint8_t* dest, std::int64_t nbytes, std::int64_t offset) override;

  // While the gate is closed, a read waits for one of the permits that ``allow`` adds. Opening lets all of them pass.
  void close_gate();
  void allow(std::int64_t reads);
  void open_gate();
  // Reads that wait at the gate now.
  std::int64_t num_waiting() const;
  // Every read so far, in the order in which they passed the gate.
  std::vector<ReadRecord> log() const;

 private:
  std::int64_t pass_gate(const ReadRecord& record);

  const Faults faults_;
  PosixReader posix_;
  mutable std::mutex mutex_;
  std::condition_variable gate_moved_;
  bool gate_closed_ = false;
  std::int64_t permits_ = 0;
  std::int64_t waiting_ = 0;
  std::vector<ReadRecord> log_;
};

}  // namespace tidegate
