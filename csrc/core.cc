#include "core.h"

namespace tidegate {

const char* core_version() { return "0.1.0"; }

}  // namespace tidegate
