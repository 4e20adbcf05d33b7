#!/usr/bin/env bash
# gpu_kit.sh pack BUILD | check | rehearse [PLAN...] | take DIR: built programs for a host that has a GPU for
# a quarter of an hour, and a compiler, Python and NVIDIA's libraries, but none of the packages that tessera
# builds on.
#   pack      strips the programs that BUILD/gpu_programs.txt lists (the target gpu_programs), adds the
#             libraries that the host lacks, and writes .carry/gpu: the archive, the runner (gpu_run.py) and
#             the plans (scripts/gpu). Git ignores it; it and the checkout are what travels
#   check     holds .carry/gpu against what the host has and the plans name: libraries, versions of symbols,
#             sizes, programs, files. Needs no GPU
#   rehearse  runs plans (all of them, or first, second...) in a root of its own with the C and C++ runtime,
#             a few tools and the kit: programs that BUILD has with an emulated GPU too in that form and with
#             small sizes, the others to their word that there is no GPU. Exit code 77 where this machine
#             permits no such root: it takes root, or namespaces for users
#   take DIR  puts the results of a run into docs/measurements/gpu/DATE-CARD and its table
# On the host: python3 .carry/gpu/gpu_run.py --plan .carry/gpu/first.txt --out DIR
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin  # chroot, where users lack it

carry=.carry/gpu     # travels
stage=build/gpu_kit  # stays here
plans=(first second third)

# What the host has: Ubuntu 24.04's C and C++ runtime, NVIDIA's driver.
on_host='^(linux-vdso|ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv|libutil|libgcc_s|libstdc\+\+|libcuda)\.so'
# Symbols of these versions at most.
newest=(GLIBC_2.39 GLIBCXX_3.4.32 CXXABI_1.3.14 GCC_13.0.0)
most_mib=44  # packed; 64 travel, the checkout has 15 of them

say() { printf 'gpu_kit.sh: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# Of a program or library, by path, what the host lacks; fails where this machine lacks one too.
libraries_of() {
  local missing
  missing=$(ldd "$1" | awk '/not found/ { print $1 }')
  [[ -z $missing ]] || die "$1 needs ${missing//$'\n'/, }, which is not on this machine"
  ldd "$1" | awk '$2 == "=>" { print $1, $3 }' | while read -r name path; do
    [[ $name =~ $on_host ]] || printf '%s\n' "$path"
  done
}

# The program of BUILD that runs $1 with an emulated GPU, where there is one.
emulated_form() {
  local twin=$build/$1_emulated
  [[ $1 != tests/gpu_* ]] || [[ -x $twin ]] || twin=$build/tests/cuda/test_cuda_${1#tests/gpu_}
  if [[ -x $twin ]]; then printf '%s\n' "$twin"; fi
}

pack() {
  build=${1:?"gpu_kit.sh: pack needs the folder of a build"}
  local list=$build/gpu_programs.txt tree=$stage/kit program library twin
  [[ -r $list ]] || die "there is no $list; configure with nvcc and build the target gpu_programs"
  rm -rf "$carry" "$stage"
  mkdir -p "$carry" "$tree"/{bin,lib,peer,machines} "$stage"/emulated/{bin,lib}
  local -A seen=()
  while read -r program; do
    [[ -n $program ]] || continue
    [[ -x $build/$program ]] || die "there is no $build/$program; build the target gpu_programs"
    strip -o "$tree/bin/${program##*/}" "$build/$program"
    printf '%s\n' "${program##*/}" >> "$tree/programs"
    libraries_of "$build/$program" > "$stage/libraries"
    while read -r library; do
      [[ -n ${seen[$library]:-} ]] || cp -L "$library" "$tree/lib/"
      seen[$library]=1
    done < "$stage/libraries"
  done < "$list"
  while read -r program; do  # what only a rehearsal has
    twin=$([[ -z $program ]] || emulated_form "$program")
    [[ -n $twin ]] || continue
    strip -o "$stage/emulated/bin/${program##*/}" "$twin"
    libraries_of "$twin" > "$stage/libraries"
    while read -r library; do
      [[ -e $tree/lib/${library##*/} ]] || cp -L "$library" "$stage/emulated/lib/"
    done < "$stage/libraries"
  done < "$list"

  # What parts read: a text, the rates of cards, the peers, what sets results beside prices.
  find core autograd nn optim data docs -type f \( -name '*.md' -o -name '*.h' -o -name '*.cpp' \) -print0 |
    LC_ALL=C sort -z | xargs -0 -r cat > "$tree/text.txt"
  head -c 4000 "$tree/text.txt" > "$tree/text_small.txt"
  cp examples/price/machines/*.json "$tree/machines/"
  cp scripts/gpu/{torch_step,losses}.py bench/compare/{pytorch_gpt,pytorch_models,step_program}.py "$tree/peer/"
  cp scripts/beside_price.py scripts/gpu/{shards,training}.sh "$tree/"
  python3 scripts/gpu/take.py --tables "$tree/gemm.json"
  { git rev-parse HEAD 2> /dev/null || echo unknown
    git status --porcelain 2> /dev/null || true; } > "$tree/commit"
  (cd "$tree" && find . -type f ! -name SHA256 -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum > SHA256)

  # A window over all of it, 256 MiB at most: what programs have in common is kept once.
  python3 - "$tree" "$carry/kit.tar.xz" << 'PYTHON'
import lzma, pathlib, sys, tarfile
size = sum(path.stat().st_size for path in pathlib.Path(sys.argv[1]).rglob("*") if path.is_file())
window = min(1 << 28, max(1 << 20, 1 << size.bit_length()))
# Preset 1: 109 MiB become 28.7 in 25 s of a processor; preset 3 takes 70 s for 28.3.
filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": window}]
def nobodys(member):  # who unpacks it owns it
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
with lzma.open(sys.argv[2], "wb", format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=filters) as packed:
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        tar.add(sys.argv[1], arcname=".", filter=nobodys)
PYTHON
  cp scripts/gpu_run.py scripts/gpu/plan.py "$carry/"
  for program in "${plans[@]}"; do cp "scripts/gpu/$program.txt" "$carry/"; done
  say "$(du -sm "$tree" | cut -f1) MiB of programs and libraries, $(du -sm "$carry" | cut -f1) MiB packed"
}

is_at_most() { [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | tail -n 1) == "$2" ]]; }

check() {
  [[ -r $carry/kit.tar.xz ]] || die "there is no $carry/kit.tar.xz; pack first"
  local tree=$stage/check file name version limit failed=0
  fault() { say "$@"; failed=1; }
  rm -rf "$tree"
  mkdir -p "$tree"
  tar -xJf "$carry/kit.tar.xz" -C "$tree"
  (cd "$tree" && sha256sum --quiet --strict -c SHA256) || fault "the archive is not what was packed"
  while read -r name; do
    [[ -x $tree/bin/$name ]] || fault "the program $name is not in the kit"
  done < "$tree/programs"
  for file in "$tree"/bin/* "$tree"/lib/*; do
    [[ -e $file ]] || continue
    while read -r name; do
      [[ $name =~ $on_host || -e $tree/lib/$name ]] ||
        fault "${file##*/} needs $name, which neither the kit nor the host has"
    done < <(readelf -dW "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    # "required from libc.so.6:", and below it a line for each version.
    while read -r version; do
      for limit in "${newest[@]}"; do
        [[ $version == "${limit%_*}"_* ]] || continue
        [[ $version =~ _[0-9] ]] || [[ $version != *_PRIVATE ]] ||
          fault "${file##*/} needs symbols of $version"
        [[ ! $version =~ _[0-9] ]] || is_at_most "$version" "$limit" ||
          fault "${file##*/} needs symbols of $version; the host has them up to $limit"
      done
    done < <(objdump -p "$file" | sed -n '/^Version References/,/^$/p' |
      awk '/^ +0x/ { print $4 }' | LC_ALL=C sort -u)
  done
  local mib=$((($(du -sk "$carry" | cut -f1) + 1023) / 1024))
  [[ $mib -le $most_mib ]] || fault "$carry has $mib MiB, more than $most_mib"
  python3 scripts/gpu/plan.py "$tree" "$carry"/*.txt || failed=1
  [[ $failed -eq 0 ]] || die "this kit would fail there"
  say "$mib MiB packed; every program, library, symbol and file is there"
}

# ---- The rehearsal's root: what a host has, and nothing that we build on

host_tools=(awk basename bash cat chmod cmp cp cut date dirname env find grep head ln ls mkdir mktemp mv nproc
  printf pwd rm sed seq setsid sha256sum sleep sort tail tar tee test timeout touch tr true uname wc xargs)

# In a namespace of its own: what is mounted and what runs here ends with it. The tools, Python and their
# libraries lie in /tools, where our programs do not look for theirs: each is started by the loader with that path.
in_root() {
  local root=$1 python=$2 name path standard loaded failed=0
  shift 2
  mkdir -p "$root"/{lib64,usr/bin,usr/lib/x86_64-linux-gnu,tools/bin,tools/lib,tools/python,tmp,proc,dev,root,results} \
    "$root"/{carry/gpu,emulated}
  ln -s usr/bin "$root/bin"
  ln -s usr/lib "$root/lib"
  cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
  for name in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libresolv.so.2 libutil.so.1 \
    libgcc_s.so.1 libstdc++.so.6; do
    cp -L "/usr/lib/x86_64-linux-gnu/$name" "$root/usr/lib/x86_64-linux-gnu/"
  done
  cp -L "$(type -P dash)" "$root/usr/bin/sh"
  cp -L "$(type -P ldd)" "$root/usr/bin/ldd"
  mount --bind /usr/bin "$root/tools/bin"
  mount --bind /usr/lib/x86_64-linux-gnu "$root/tools/lib"
  add_tool() {  # add_tool NAME PATH WORDS...
    printf '#!/bin/sh\n%sexec /lib64/ld-linux-x86-64.so.2 --library-path /tools/lib:/tools/python/lib --argv0 "$0" %s "$@"\n' \
      "${3:-}" "$2" > "$root/usr/bin/$1"
    chmod +x "$root/usr/bin/$1"
  }
  for name in "${host_tools[@]}"; do
    path=$(realpath "/usr/bin/$name") || die "a rehearsal needs /usr/bin/$name"
    add_tool "$name" "/tools/bin/${path##*/}"
  done
  path=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
  mount --bind "$(dirname "$(dirname "$path")")" "$root/tools/python"
  add_tool python3 "/tools/python/bin/${path##*/}" 'export PYTHONHOME=/tools/python; '
  for standard in "$root"/tools/python/lib/python3*/{site,dist}-packages; do  # the standard library alone
    [[ ! -d $standard ]] || mount -t tmpfs none "$standard"
  done
  mount --bind "$carry" "$root/carry/gpu"
  mount --bind "$stage/emulated" "$root/emulated"
  mount --rbind /dev "$root/dev"
  mount -t proc proc "$root/proc"

  inside() { env -i PATH=/usr/bin HOME=/root TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1 "$(type -P chroot)" "$root" "$@"; }
  for name in "$@"; do
    say "rehearsing $name"
    inside python3 /carry/gpu/gpu_run.py --plan "/carry/gpu/$name.txt" --out "/results/$name" \
      --rehearse /emulated --budget 3600 > "$stage/rehearsal-$name.log" 2>&1 || {
      failed=1
      cat "$stage/rehearsal-$name.log" >&2
    }
    grep -E '^ *[0-9]+ s  ' "$stage/rehearsal-$name.log" || true
  done
  # The programs of the kit themselves, also those that ran in their emulated form.
  for path in "$root"/tmp/tessera-gpu-kit/bin/*; do
    path=/tmp/tessera-gpu-kit/bin/${path##*/}
    loaded=$(inside env LD_LIBRARY_PATH=/tmp/tessera-gpu-kit/lib /lib64/ld-linux-x86-64.so.2 --list "$path" 2>&1) &&
      [[ $loaded != *"not found"* ]] || {
      say "${path##*/} does not load: $loaded"
      failed=1
    }
  done
  return "$failed"
}

# The first Python here that can unpack the kit.
python_of_rehearsals() {
  local python
  for python in "${TESSERA_PYTHON:-python3}" /usr/bin/python3; do
    if "$python" -c 'import ctypes, lzma' 2> /dev/null; then
      printf '%s\n' "$python"
      return
    fi
  done
  die "a rehearsal needs a python3 with lzma"
}

rehearse() {
  [[ -d $stage/emulated && -r $carry/kit.tar.xz ]] || die "there is no kit here; pack first"
  [[ $# -gt 0 ]] || set -- "${plans[@]}"
  local name space=(unshare --mount --pid --fork)
  for name in "$@"; do
    [[ -r $carry/$name.txt ]] || die "there is no plan $name; there are ${plans[*]}"
  done
  [[ $(id -u) -eq 0 ]] || space+=(--map-root-user)
  "${space[@]}" mount --bind /proc /proc 2> /dev/null || {
    say "no rehearsal: it mounts and changes its root, which takes root, or namespaces for users"
    exit 77
  }
  rm -rf "$stage/root"
  "${space[@]}" "$0" --in-root "$stage/root" "$(python_of_rehearsals)" "$@" || die "the rehearsal failed; see $stage/rehearsal-*.log"
  say "rehearsed: $*"
}

command=${1:-}
[[ $# -eq 0 ]] || shift
case $command in
  pack | check | rehearse) "$command" "$@" ;;
  take) python3 scripts/gpu/take.py "$@" ;;
  --in-root) in_root "$@" ;;
  *)
    sed -n '2,/^set /s/^# \{0,1\}//p' "scripts/gpu_kit.sh" >&2
    exit 2
    ;;
esac
