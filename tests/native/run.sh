#!/usr/bin/env bash
# Builds and runs the tests of the native core: run.sh [plain | thread | address] ...   (default: all three)
set -euo pipefail
cd "$(dirname "$0")/../.."
for kind in "${@:-plain thread address}"; do
  for one in $kind; do
    case $one in
      plain) sanitize= ;;
      thread) sanitize=thread ;;
      address) sanitize=address,undefined ;;
      *) echo "run.sh: $one is none of plain, thread, address" >&2; exit 2 ;;
    esac
    folder=build/native-$one
    # A sanitizer does not see what the matrix unit reads and writes.
    emulate=OFF
    [ -z "$sanitize" ] && grep -qw amx_int8 /proc/cpuinfo || emulate=ON
    mkdir -p "$folder"
    cmake -S . -B "$folder" -DCMAKE_BUILD_TYPE=Release -DTIDEGATE_NATIVE_TESTS=ON -DTIDEGATE_SANITIZE=$sanitize -DTIDEGATE_EMULATE_MATRIX_UNIT=$emulate >"$folder/build.log" 2>&1 ||
      { cat "$folder/build.log"; exit 1; }
    cmake --build "$folder" --parallel 2 >>"$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }
    echo "== $one"
    ctest --test-dir "$folder" --output-on-failure --no-tests=error | tail -n +3
  done
done
