#!/bin/sh
# shards.sh COUNT COMMAND...: the tests of a GoogleTest program in COUNT processes at once, for those
# that wait more than they compute.
count=$1 index=0 processes=""
shift
while [ $index -lt "$count" ]; do
  GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$index "$@" &
  processes="$processes $!" index=$((index + 1))
done
status=0
for process in $processes; do
  wait "$process" || status=1
done
exit $status
