#!/usr/bin/env bash
# test_check_ptx.sh CHECK PTX: runs check_ptx.sh over the PTX of broken_kernels.cu, with and without
# --resources. Each broken kernel must be named with what is wrong, the sound one must not, and alone
# it must pass.
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
broken_kernels  scalar_kernel     load16 store<=0 2<=load
broken_kernels  product_kernel    mma
broken_kernels  wide_kernel       load<=1
broken_kernels  (local|generic|division|call|clamp|text)_kernel  load
broken_kernels  f64_division_kernel  +f64
broken_kernels  missing_kernel    load16
broken_kernels  (greedy|crowded|staged)_kernel
END
if "$check" "$folder/rules" "$ptx" > "$folder/report"; then fail "the broken kernels passed"; fi
expect() {
  grep -qF "$1" "$folder/report" || fail "not reported: $1"
}
expect "scalar_kernel: no load16"
expect "scalar_kernel: 1 of store, and at most 0 are meant"
expect "scalar_kernel: 1 of load, and at least 2 are meant"
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
expect " clamp_kernel: 1 of clamp_equal, which it may not have"
expect " text_kernel: 1 of text, which it may not have"
expect "unlisted_kernel: no rule in"
expect "no kernel fits missing_kernel"
grep -q sound_kernel "$folder/report" && fail "the sound kernel was reported"

printf 'broken_kernels  sound_kernel  load16 store16\nbroken_kernels  .*  +local +generic +f64 +loop_f64_division +loop_division +call +clamp_equal +text\n' > "$folder/rules"
"$check" "$folder/rules" "$ptx" >> "$folder/report" || fail "kernels without demands did not pass"

# Registers and shared memory. 256 threads with 40 KiB fit five times into 228, with 56 four times.
cat > "$folder/resources" << 'END'
broken_kernels  greedy_kernel    registers<=40 40<=warps
broken_kernels  crowded_kernel   registers<=40 48<=warps
broken_kernels  staged_kernel    dynamic=57344 registers<=40 40<=warps
broken_kernels  local_kernel     registers<=40 48<=warps
broken_kernels  unlisted_kernel  block=1024
broken_kernels  missing_kernel   block=256 registers<=40 48<=warps
broken_kernels  (sound|scalar|product|wide|generic|division|f64_division|call)_kernel  block=256 registers<=80 24<=warps
END
if "$check" --resources "$folder/resources" "$ptx" > "$folder/report"; then
  fail "kernels that take too much passed"
fi
grep -q "greedy_kernel: [0-9]* of registers, and at most 40 are meant" "$folder/report" ||
  fail "not reported: registers"
grep -q "greedy_kernel: [0-9]* of warps, and at least 40 are meant" "$folder/report" ||
  fail "not reported: warps that registers leave"
expect "crowded_kernel: 40 of warps, and at least 48 are meant"
expect "staged_kernel: 32 of warps, and at least 40 are meant"
expect "local_kernel: its block is not known: block=N is missing"
expect "not registers<=N and N<=warps: broken_kernels  unlisted_kernel"
expect "no kernel fits missing_kernel"
grep -q sound_kernel "$folder/report" && fail "the sound kernel was reported"
grep -q "crowded_kernel: .* of registers" "$folder/report" && fail "reported: few registers"

cat > "$folder/resources" << 'END'
broken_kernels  staged_kernel    block=512 registers<=40 8<=warps
broken_kernels  crowded_kernel   block=512 registers<=40 8<=warps
broken_kernels  [^u].*_kernel  block=128 registers<=255 8<=warps
END
if "$check" --resources "$folder/resources" "$ptx" > "$folder/report"; then fail "wrong lines passed"; fi
expect "staged_kernel: it has dynamic shared memory: dynamic=N is missing"
expect "crowded_kernel: block=512 is more than its bound of 256"
expect "unlisted_kernel: no rule in"

cat > "$folder/resources" << 'END'
broken_kernels  staged_kernel  dynamic=57344 registers<=40 32<=warps
broken_kernels  .*_kernel  block=128 registers<=255 8<=warps
END
"$check" --resources "$folder/resources" "$ptx" >> "$folder/report" ||
  fail "kernels within their numbers did not pass"
if PTXAS=/bin/false "$check" --resources "$folder/resources" "$ptx" > /dev/null 2>&1; then
  fail "a ptxas that fails passed"
fi

[[ $failed -eq 0 ]] || cat "$folder/report"
exit "$failed"
