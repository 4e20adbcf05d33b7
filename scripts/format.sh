#!/usr/bin/env bash
# format.sh [--check]: formats the C++ files under version control, or names those that are not
# formatted and fails. The style is .clang-format as clang-format 14 (Debian 12) reads it: other
# versions differ in details.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_packages.sh clang-format git
tool=clang-format
command -v clang-format-14 > /dev/null && tool=clang-format-14
arguments=(-i)
[[ ${1:-} == --check ]] && arguments=(--dry-run -Werror)
git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 -r "$tool" --style=file "${arguments[@]}"
