#!/usr/bin/env bash
# Time from process start to the first token of the demo model: median and range of 21 runs.
# usage: tests/start_up.sh target/release/talon
set -euo pipefail
binary=$1
for _ in $(seq 21); do
  begin=$(date +%s%N)
  "$binary" generate --max-tokens 1 "What is a whale?" >/dev/null
  echo $((($(date +%s%N) - begin) / 1000))
done | sort -n | awk '
  { us[NR] = $1 }
  END { printf "process start to first token: median %.1f ms, range %.1f to %.1f ms, %d runs\n",
               us[(NR + 1) / 2] / 1000, us[1] / 1000, us[NR] / 1000, NR }'
