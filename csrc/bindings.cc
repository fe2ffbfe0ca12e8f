// The only file that knows Python. One bind_*() function a header of the core, called from the module at the end.
#include <nanobind/nanobind.h>

#include "core.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "Native core of tidegate";
  m.attr("version") = tidegate::core_version();
}
