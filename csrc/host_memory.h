// What the arena and the start of the process ask of the operating system. Linux only.
#pragma once
#include <cstdint>

namespace tidegate {

// Makes every page of a private anonymous mapping present, by ``num_threads`` threads; with huge pages for all whole ones
// from ``begin`` on where the kernel offers them. Returns 0 or an errno; ENOMEM if the memory is not there.
int populate(std::uint8_t* begin, std::int64_t nbytes, int num_threads);

// Gives back what the C library keeps of freed memory. Reading a tokenizer leaves tens of megabytes of it.
void trim_heap();

}  // namespace tidegate
