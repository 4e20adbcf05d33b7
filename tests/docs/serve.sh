#!/usr/bin/env bash
# Usage: serve.sh SERVE MAKE_FILES FOLDER: talks to examples/recipes/serve over two connections at once.
set -euo pipefail
serve=$1 make_files=$2 folder=$3
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"
"$make_files"
"$serve" classifier 0 > log &
server=$!
trap 'kill "$server"' EXIT
until grep -q listening log; do
  kill -0 "$server"
  sleep 0.05
done
port=$(grep -oE '[0-9]+$' log)
exec 3<> "/dev/tcp/localhost/$port" 4<> "/dev/tcp/localhost/$port"
echo "where is my card" >&3
echo "thank you" >&4
echo "where is my card" >&4
read -r -t 20 first <&3
read -r -t 20 other <&4
read -r -t 20 again <&4
echo "$first; $other; $again"
[[ $first == "$again" && $first =~ ^LABEL_[01]$'\t'0\.[0-9]+$ && $other =~ ^LABEL_[01]$'\t'0\.[0-9]+$ ]]
