#!/usr/bin/env bash
# portable_prefix.sh DIR: gathers the libraries that tessera builds on into DIR, without root, for a
# host that has a compiler and perhaps a CUDA toolkit but no way to install packages. Run it on a
# Debian of the same release, copy DIR to the same place on that host, and there:
#
#     source DIR/environment
#     cmake --preset release && cmake --build --preset release
#
# The packages come from the system's own archive (apt-get download) and are unpacked, not installed.
# What every host has stays away: the C library and the compiler's. So does MPI, whose wrappers know
# the place they were installed to; the build does without it.
set -euo pipefail

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: portable_prefix.sh DIR" >&2
  exit 2
fi
for tool in apt-get apt-cache dpkg-deb; do
  command -v "$tool" > /dev/null || {
    echo "portable_prefix.sh: there is no $tool here; run it on a Debian and copy the folder" >&2
    exit 1
  }
done
mkdir -p "$1"
prefix=$(realpath "$1")
packages=(libeigen3-dev nlohmann-json3-dev zlib1g-dev libicu-dev libyaml-cpp-dev libprotobuf-dev
  protobuf-compiler libpng-dev libdnnl-dev libxxhash-dev libgtest-dev libbenchmark-dev libcli11-dev
  libboost-context-dev)

# All that they depend on, but for what comes with any compiler and for packages without libraries.
mapfile -t all < <(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
  --no-breaks --no-replaces --no-enhances "${packages[@]}" | grep -E '^[a-z0-9]' | sort -u |
  grep -vE '^(libc6|libc-|libc-dev|libcrypt|libgcc|libstdc|gcc-|cpp|g\+\+|binutils|linux-|libnsl|libtirpc|rpcsvc|debconf|cdebconf|dpkg|perl|python3|tzdata|libgomp|opencl|ocl-|intel-)')
[[ ${#all[@]} -ge ${#packages[@]} ]] || {
  echo "portable_prefix.sh: apt knows no dependencies; run apt-get update first" >&2
  exit 1
}

downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
echo "Fetching ${#all[@]} packages"
# As who runs it: apt's own user cannot write to a folder of somebody else.
(cd "$downloads" && apt-get -qq -o APT::Sandbox::User="$(id -un)" download "${all[@]}")
for package in "$downloads"/*.deb; do
  dpkg-deb -x "$package" "$prefix"
done

library=usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2> /dev/null || gcc -dumpmachine)
cat > "$prefix/environment" << END
# Source this before cmake, and before running what was built.
export CMAKE_PREFIX_PATH="$prefix/usr\${CMAKE_PREFIX_PATH:+:\$CMAKE_PREFIX_PATH}"
export LD_LIBRARY_PATH="$prefix/$library\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export PATH="$prefix/usr/bin:\$PATH"
END
printf 'portable_prefix.sh: %s packages, %s; source %s/environment\n' "${#all[@]}" \
  "$(du -sh "$prefix" | cut -f1)" "$prefix"
