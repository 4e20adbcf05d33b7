#!/usr/bin/env bash
# install_packages.sh PACKAGE...: installs those Debian packages that are missing. Quick, and needs
# neither root nor network, where nothing is.
set -euo pipefail

if ! command -v dpkg-query > /dev/null; then
  echo "install_packages.sh: no dpkg here; install the counterparts of: $*" >&2
  exit 0  # configure names what is missing
fi
missing=()
for package in "$@"; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2> /dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

echo "Installing ${missing[*]}"
as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo > /dev/null; then
    echo "install_packages.sh: needs root or sudo to install packages; ask for: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
"${as_root[@]}" "${apt[@]}" update
"${as_root[@]}" "${apt[@]}" install -y --no-install-recommends "${missing[@]}" > /dev/null
