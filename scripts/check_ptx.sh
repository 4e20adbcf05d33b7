#!/usr/bin/env bash
# check_ptx.sh RULES FILE.ptx...: what the compiler made of the hot kernels, against a list of rules:
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
#   loop               instructions of the longest loop that has no loop inside: what launches say
#                      their threads issue (LaunchConfig::instructions) is counted there
# Forbidden unless the line says +COUNT:
#   local              arrays in local memory
#   generic            accesses whose memory is not known when compiling
#   f64                arithmetic of 64 bits in a kernel that has no `double` among its types
#   loop_f64_division  division and square roots of 64 bits in a loop, in any kernel
#   loop_division      divisions of integers in a loop
#   call               functions that were not inlined
#
# SASS is not read: a toolkit without extras has no disassembler. ptxas itself refuses spills when
# the library is built.
set -euo pipefail
[[ $# -ge 2 ]] || { echo "usage: check_ptx.sh RULES FILE.ptx..." >&2; exit 2; }
rules=$1
shift
for file in "$rules" "$@"; do
  [[ -r $file ]] || { echo "check_ptx.sh: there is no $file" >&2; exit 2; }
done
command -v c++filt > /dev/null || { echo "check_ptx.sh: needs c++filt; install binutils" >&2; exit 2; }

# FILE KERNEL count=number... for each kernel.
count_instructions() {
  awk '
    function finish(   i, j, inner, line) {
      if (name == "") return
      for (i = 1; i <= loops; ++i) {
        for (line in division) if (line + 0 >= from[i] && line + 0 <= to[i]) {
          ++n[division[line]]
          delete division[line]
        }
      }
      for (i = 1; i <= loops; ++i) {
        inner = 1
        for (j = 1; j <= loops; ++j)
          if (j != i && from[i] <= from[j] && to[j] <= to[i]) inner = 0
        if (inner && after[i] - before[i] > n["loop"]) n["loop"] = after[i] - before[i]
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
      delete n; delete division; delete seen; delete begins
      loops = instructions = 0
    }
    /^}/ { finish() }
    name == "" { next }
    /^\$L[^ ]*:/ { label = $1; sub(/:.*/, "", label); seen[label] = FNR; begins[label] = instructions }
    /;[ \t]*$/ && !/^[ \t]*(\.|\/\/)/ { ++instructions }
    / bra(\.uni)?[ \t]/ || /\tbra(\.uni)?[ \t]/ {
      label = $NF
      sub(/;.*/, "", label)
      if (label in seen) {
        ++loops
        from[loops] = seen[label]; to[loops] = FNR
        before[loops] = begins[label]; after[loops] = instructions
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
    END { finish() }
  ' "$@"
}

# Names as in the sources, without spaces.
count_instructions "$@" | c++filt | sed -E '
  s/\(anonymous namespace\):://g
  s/[A-Za-z_0-9]+:://g
  s/^([^ ]+) void /\1 /
  :inner
  s/^([^ ]+ [^(]*[^ (]) +/\1 /
  s/^([^ ]+) ([^(]*)\(.*\)( [a-z0-9_]+=[0-9]+)*$/\1|\2|&/' |
awk -v rules="$rules" '
  BEGIN {
    while ((getline line < rules) > 0) {
      sub(/#.*/, "", line)
      count = split(line, word, /[ \t]+/)
      if (line ~ /^[ \t]*$/) continue
      if (count < 2 || line ~ /^[ \t]/) { print rules ": not a rule: " line; failed = 1; continue }
      ++lines
      file[lines] = word[1]; kernel[lines] = word[2]; conditions[lines] = ""
      for (i = 3; i <= count; ++i) conditions[lines] = conditions[lines] " " word[i]
    }
    forbidden_count = split("local generic f64 loop_f64_division loop_division call", forbidden, " ")
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
    count = split(conditions[rule], word, " ")
    for (i = 1; i <= count; ++i) {
      what = word[i]
      if (what ~ /^\+/) continue
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
