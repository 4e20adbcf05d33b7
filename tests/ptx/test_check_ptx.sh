#!/usr/bin/env bash
# test_check_ptx.sh CHECK PTX: runs check_ptx.sh over the PTX of broken_kernels.cu. Each broken kernel
# must be named with what is wrong, the sound one must not, and alone it must pass.
set -euo pipefail
check=$1 ptx=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
fail() {
  echo "test_check_ptx.sh: $1"
  failed=1
}

cat > "$folder/rules" << 'END'
broken_kernels  sound_kernel      load16 store16 1<=load16 !load !store !division
broken_kernels  scalar_kernel     load16 store<=0 2<=load 5<=loop
broken_kernels  product_kernel    mma
broken_kernels  wide_kernel       load<=1
broken_kernels  (local|generic|division|call)_kernel  load
broken_kernels  f64_division_kernel  +f64 5<=loop loop<=6
broken_kernels  missing_kernel    load16
END
if "$check" "$folder/rules" "$ptx" > "$folder/report"; then fail "the broken kernels passed"; fi
expect() {
  grep -qF "$1" "$folder/report" || fail "not reported: $1"
}
expect "scalar_kernel: no load16"
expect "scalar_kernel: 1 of store, and at most 0 are meant"
expect "scalar_kernel: 1 of load, and at least 2 are meant"
expect "scalar_kernel: 0 of loop, and at least 5 are meant"
grep -q "f64_division_kernel: [0-9]* of loop, and at most 6 are meant" "$folder/report" ||
  fail "not reported: a long loop"
grep -q "f64_division_kernel: [0-9]* of loop, and at least" "$folder/report" &&
  fail "reported: a loop that is long enough"
expect "product_kernel: no mma"
expect "wide_kernel: 1 of f64, which it may not have"
grep -q "local_kernel: [0-9]* of local, which it may not have" "$folder/report" ||
  fail "not reported: local"
expect "generic_kernel: 1 of generic, which it may not have"
grep -q " division_kernel: [0-9]* of loop_division, which it may not have" "$folder/report" ||
  fail "not reported: loop_division"
grep -q "f64_division_kernel: [0-9]* of loop_f64_division, which it may not have" "$folder/report" ||
  fail "not reported: loop_f64_division"
expect "call_kernel: 1 of call, which it may not have"
expect "unlisted_kernel: no rule in"
expect "no kernel fits missing_kernel"
grep -q sound_kernel "$folder/report" && fail "the sound kernel was reported"

printf 'broken_kernels  sound_kernel  load16 store16\nbroken_kernels  .*  +local +generic +f64 +loop_f64_division +loop_division +call\n' > "$folder/rules"
"$check" "$folder/rules" "$ptx" >> "$folder/report" || fail "kernels without demands did not pass"

[[ $failed -eq 0 ]] || cat "$folder/report"
exit "$failed"
