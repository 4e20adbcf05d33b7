#!/bin/sh
# shards.sh COUNT PROGRAM: the tests of a GoogleTest program in COUNT processes at once, for those
# that wait more than they compute.
index=0 processes=""
while [ $index -lt "$1" ]; do
  GTEST_TOTAL_SHARDS=$1 GTEST_SHARD_INDEX=$index "$2" &
  processes="$processes $!" index=$((index + 1))
done
status=0
for process in $processes; do
  wait "$process" || status=1
done
exit $status
