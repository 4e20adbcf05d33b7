#!/usr/bin/env bash
# check_ptx.sh [--resources] RULES FILE.ptx...: what the compiler made of kernels, against a list of rules:
# vectors of 16 bytes between memory and registers, tensor cores where they are meant, and no slow
# instruction that nobody asked for. Exit status 1 names each kernel that breaks a rule.
#
# A rule is a line: the file's name, a pattern of kernels (as c++filt writes them, without namespaces
# and parameters) and conditions. A kernel takes the first line that fits it; one without a line is an
# error, and so is a line without a kernel. Conditions: COUNT (at least one), !COUNT (none), and A<=B
# of counts and numbers. Counts of instructions:
#   load16 store16     of 16 bytes, global memory
#   load8 store8       of 8 bytes by a vector
#   load store         any other, global memory
#   shared16           of 16 bytes, shared memory
#   mma                products of tiles on tensor cores
#   division           divisions and square roots of 32 bits
# Forbidden unless the line says +COUNT:
#   local              arrays in local memory
#   generic            accesses whose memory is not known when compiling
#   f64                arithmetic of 64 bits in a kernel that has no `double` among its types
#   loop_f64_division  division and square roots of 64 bits in a loop, in any kernel
#   loop_division      divisions of integers in a loop
#   call               functions that were not inlined
#   clamp_equal        max(min(x, K), 0) == K: ptxas 13.0 makes VIMNMX.RELU of it with a predicate that is
#                      true for K - 1 too. Compare x
#   text               the address of a string: the host cannot read it
#
# --resources: what ptxas said when it compiled FILE.ptx is read from FILE.ptxas (cmake/keep_ptx.sh), else
# ptxas (PTXAS, else that of PATH) is run. The numbers are those of Hopper:
#   registers          of a thread
#   shared             bytes of static shared memory of a block
#   warps              resident on a multiprocessor. A line says block=THREADS where a kernel states no
#                      bound of its own or is launched with fewer, and dynamic=BYTES of a kernel that
#                      has dynamic shared memory
# Each line bounds registers from above and warps from below.
#
# SASS is not read: a toolkit without extras has no disassembler. ptxas itself refuses spills when
# the library is built.
set -euo pipefail
counts=count_instructions
if [[ ${1:-} == --resources ]]; then
  counts=count_resources
  shift
fi
[[ $# -ge 2 ]] || { echo "usage: check_ptx.sh [--resources] RULES FILE.ptx..." >&2; exit 2; }
rules=$1
shift
for file in "$rules" "$@"; do
  [[ -r $file ]] || { echo "check_ptx.sh: there is no $file" >&2; exit 2; }
done
command -v c++filt > /dev/null || { echo "check_ptx.sh: needs c++filt; install binutils" >&2; exit 2; }

# FILE KERNEL count=number... for each kernel.
count_instructions() {
  awk '
    function finish(   i, line) {
      if (name == "") return
      for (i = 1; i <= loops; ++i) {
        for (line in division) if (line + 0 >= from[i] && line + 0 <= to[i]) {
          ++n[division[line]]
          delete division[line]
        }
      }
      printf "%s %s", file, name
      for (i in n) printf " %s=%d", i, n[i]
      print ""
      name = ""
    }
    FNR == 1 { finish(); file = FILENAME; sub(/.*\//, "", file); sub(/(\.cu)?\.ptx$/, "", file) }
    /(^|[ \t])\.entry / {
      finish()
      name = $0
      sub(/.*\.entry /, "", name)
      sub(/\(.*/, "", name)
      delete n; delete division; delete seen; delete least; delete most; delete clamped
      loops = 0
    }
    /^}/ { finish() }
    name == "" { next }
    /^\$L[^ ]*:/ { label = $1; sub(/:.*/, "", label); seen[label] = FNR }
    / bra(\.uni)?[ \t]/ || /\tbra(\.uni)?[ \t]/ {
      label = $NF
      sub(/;.*/, "", label)
      if (label in seen) {
        ++loops
        from[loops] = seen[label]; to[loops] = FNR
      }
    }
    /\.local/ { ++n["local"] }
    /ld\.global/ {
      if ($0 ~ /\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16)/) ++n["load16"]
      else if ($0 ~ /\.(v2\.[bfsu]32|v4\.[bfsu]16)/) ++n["load8"]
      else ++n["load"]
    }
    /st\.global/ {
      if ($0 ~ /\.(v4\.[bfsu]32|v2\.[bfsu]64|v8\.[bfsu]16)/) ++n["store16"]
      else if ($0 ~ /\.(v2\.[bfsu]32|v4\.[bfsu]16)/) ++n["store8"]
      else ++n["store"]
    }
    /(ld|st)\.shared\.(v4\.[bfsu]32|v2\.[bfsu]64)/ { ++n["shared16"] }
    /[ \t](ld|st)\.(volatile\.)?(v[248]\.)?[bfsu][0-9]/ { ++n["generic"] }
    /mma\.sync/ && !/(load|store)/ || /wmma\.mma|wgmma\.mma/ { if (!/wmma\.(load|store)/) ++n["mma"] }
    /[ \t](add|sub|mul|fma|div|sqrt|rcp|rsqrt)(\.[a-z]+)*\.f64/ { ++n["f64"] }
    /[ \t](div|sqrt|rcp|rsqrt)(\.[a-z]+)*\.f64/ { division[FNR] = "loop_f64_division" }
    /[ \t](div|sqrt|rcp|rsqrt)(\.[a-z]+)*\.f32/ { ++n["division"] }
    /[ \t](div|rem)\.[su](16|32|64)/ { division[FNR] = "loop_division" }
    /[ \t]call(\.uni)?[ \t]/ { ++n["call"] }
    /[ \t](mov|cvta)[a-z.]*\.[bu]64.*\$str/ { ++n["text"] }
    /[ \t](min|max)\.[su](32|64)/ || /[ \t]setp\.(eq|ne)\.[su](32|64)/ {
      gsub(/[,;]/, "")
      if ($1 ~ /^min/) {
        least[$2] = $4
        if ($3 in most) clamped[$2] = $4
      } else if ($1 ~ /^max/ && $4 == "0") {
        most[$2] = 1
        if ($3 in least) clamped[$2] = least[$3]
      }
      for (i = 3; i <= 4; ++i) if ($1 ~ /^setp/ && $i in clamped && clamped[$i] == $(7 - i)) ++n["clamp_equal"]
    }
    END { finish() }
  ' "$@"
}

# The same lines: registers, shared, threads (.maxntid) and dynamic (whether it has any).
count_resources() {
  local folder file
  folder=$(mktemp -d)
  # shellcheck disable=SC2064  # the folder of now
  trap "rm -rf '$folder'" EXIT
  # The largest files first: the last one alone would take as long as half of all. A name twice is
  # two files.
  ls -S -- "$@" | awk '{ printf "%s\n%s/%d\n", $0, folder, NR }' folder="$folder" |
    xargs -d '\n' -n 2 -P "$(nproc)" bash -c '
      if [[ -s ${1%.ptx}.ptxas && ! ${1%.ptx}.ptxas -ot $1 ]]; then cp "${1%.ptx}.ptxas" "$2"; else
      "${PTXAS:-ptxas}" -v -arch="$(awk "/^\.target/ { sub(/,/, \"\", \$2); print \$2; exit }" "$1")" \
        "$1" -o /dev/null > "$2" 2>&1 || { cat "$2" >&2; exit 1; }; fi
      ln -s "$(realpath "$1")" "$2.ptx"' _
  for file in "$folder"/*.ptx; do
    path=$(realpath "$file")
    # A file may have no kernel at all.
    { LC_ALL=C grep -hE '\.entry |^\.maxntid|dynamic_shared|Compiling entry|registers' \
      "$path" "${file%.ptx}" || [[ $? -eq 1 ]]; } |
      awk -v path="$path" '
      BEGIN { file = path; sub(/.*\//, "", file); sub(/(\.cu)?\.ptx$/, "", file) }
      /Compiling entry function/ { split($0, quoted, "\x27"); name = quoted[2]; next }
      /\.entry / { name = $0; sub(/.*\.entry /, "", name); sub(/\(.*/, "", name); next }
      /^\.maxntid/ { gsub(/,/, ""); threads[name] = $2 * $3 * $4; next }
      /Used [0-9]+ registers/ {
        match($0, /Used [0-9]+/)
        registers = substr($0, RSTART + 5, RLENGTH - 5)
        shared = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH) + 0 : 0
        printf "%s %s registers=%d shared=%d threads=%d dynamic=%d\n", file, name, registers, shared,
          threads[name], dynamic[name]
        next
      }
      /dynamic_shared/ { dynamic[name] = 1 }'
  done
}

# Names as in the sources, without spaces.
"$counts" "$@" | c++filt | sed -E '
  s/\(anonymous namespace\):://g
  s/[A-Za-z_0-9]+:://g
  s/^([^ ]+) void /\1 /
  :inner
  s/^([^ ]+ [^(]*[^ (]) +/\1 /
  s/^([^ ]+) ([^(]*)\(.*\)( [a-z0-9_]+=[0-9]+)*$/\1|\2|&/' |
awk -v rules="$rules" -v resources="$([[ $counts == count_resources ]] && echo 1)" '
  # Resident warps of a Hopper multiprocessor: registers go out 256 at a time to warps, of which each
  # of four schedulers has as many; a block has 1 KiB of shared memory beside its own.
  function resident(registers, shared, threads,   warps, blocks, fit) {
    warps = int((threads + 31) / 32)
    blocks = 32
    fit = int(64 / warps)
    if (fit < blocks) blocks = fit
    fit = int(int(16384 / (int((registers * 32 + 255) / 256) * 256)) * 4 / warps)
    if (fit < blocks) blocks = fit
    fit = int(228 * 1024 / (int((shared + 127) / 128) * 128 + 1024))
    if (fit < blocks) blocks = fit
    return blocks * warps
  }
  # The number of SETTING=NUMBER among the conditions, or -1.
  function setting(conditions, what) {
    if (!match(conditions " ", " " what "=[0-9]+ ")) return -1
    return substr(conditions, RSTART + length(what) + 2) + 0
  }
  BEGIN {
    while ((getline line < rules) > 0) {
      sub(/#.*/, "", line)
      count = split(line, word, /[ \t]+/)
      if (line ~ /^[ \t]*$/) continue
      if (count < 2 || line ~ /^[ \t]/) { print rules ": not a rule: " line; failed = 1; continue }
      ++lines
      file[lines] = word[1]; kernel[lines] = word[2]; conditions[lines] = ""
      for (i = 3; i <= count; ++i) conditions[lines] = conditions[lines] " " word[i]
      if (resources && conditions[lines] !~ / registers<=[0-9].* [0-9]+<=warps/) {
        print rules ": not registers<=N and N<=warps: " line
        failed = 1
      }
    }
    forbidden_count = split("local generic f64 loop_f64_division loop_division call clamp_equal text", forbidden, " ")
  }
  function broken(what) { print name[1] ".cu: " name[2] ": " what; failed = 1 }
  function value_of(what) { return what ~ /^[0-9]+$/ ? what + 0 : n[what] + 0 }
  {
    split($0, name, "|")
    gsub(/ /, "", name[2])
    delete n
    rest = name[3]
    while (match(rest, / [a-z0-9_]+=[0-9]+$/)) {
      split(substr(rest, RSTART + 1), pair, "=")
      n[pair[1]] = pair[2] + 0
      rest = substr(rest, 1, RSTART - 1)
    }
    for (rule = 1; rule <= lines; ++rule)
      if (file[rule] == name[1] && name[2] ~ ("^" kernel[rule])) break
    if (rule > lines) { broken("no rule in " rules); next }
    used[rule] = 1
    ++kernels
    allowed = conditions[rule] " "
    for (i = 1; i <= forbidden_count; ++i) {
      what = forbidden[i]
      if (what == "f64" && name[2] ~ /double/) continue
      if (n[what] > 0 && !index(allowed, " +" what " ")) broken(n[what] " of " what ", which it may not have")
    }
    if (resources) {
      threads = setting(conditions[rule], "block")
      more = setting(conditions[rule], "dynamic")
      if (threads > n["threads"] && n["threads"] > 0)
        broken("block=" threads " is more than its bound of " n["threads"])
      if (threads < 0) threads = n["threads"]
      if (threads <= 0) { broken("its block is not known: block=N is missing"); next }
      if (n["dynamic"] && more < 0) { broken("it has dynamic shared memory: dynamic=N is missing"); next }
      if (!n["dynamic"] && more >= 0) broken("it has no dynamic shared memory, and dynamic= is said")
      n["warps"] = resident(n["registers"], n["shared"] + (more > 0 ? more : 0), threads)
    }
    count = split(conditions[rule], word, " ")
    for (i = 1; i <= count; ++i) {
      what = word[i]
      if (what ~ /^\+/ || resources && what ~ /^(block|dynamic)=/) continue
      if (what ~ /^!/) {
        what = substr(what, 2)
        if (n[what] > 0) broken(n[what] " of " what ", and none is meant")
      } else if (split(what, pair, "<=") == 2) {
        if (value_of(pair[1]) <= value_of(pair[2])) continue
        if (pair[1] ~ /^[0-9]+$/) broken(n[pair[2]] + 0 " of " pair[2] ", and at least " pair[1] " are meant")
        else broken(n[pair[1]] " of " pair[1] ", and at most " value_of(pair[2]) " are meant")
      } else if (!(n[what] > 0)) {
        broken("no " what)
      }
    }
  }
  END {
    for (rule = 1; rule <= lines; ++rule)
      if (!used[rule]) { print file[rule] ".cu: no kernel fits " kernel[rule]; failed = 1 }
    if (!failed) print kernels " kernels keep the rules of " rules
    exit failed
  }'
