// What the native tests share.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

inline void check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::_Exit(1);  // other threads still use what exit() would destroy
}

struct Random {
  std::uint64_t state;
  int below(int bound) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<int>((state >> 33) % static_cast<std::uint64_t>(bound));
  }
};
