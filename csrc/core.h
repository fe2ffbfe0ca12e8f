#pragma once

namespace tidegate {

// Version of the native core; the Python package refuses to run with another one.
const char* core_version();

}  // namespace tidegate
