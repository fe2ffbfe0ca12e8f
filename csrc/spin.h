// A turn of a loop in which a thread waits for another one.
#pragma once

namespace tidegate {

// Leaves the core's units to its other hardware thread for a moment.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace tidegate
