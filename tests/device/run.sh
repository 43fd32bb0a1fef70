#!/bin/sh
# Builds and runs the tests that need a GPU (README.md).
#
#   tests/device/run.sh build              where there is nvcc: builds, prints the binary's path
#   tests/device/run.sh BINARY [FILTER]    where there is a GPU, in a checkout of the same commit
set -eu
cd "$(dirname "$0")/../.."

if [ "${1:-}" = build ]; then
  built=$(cargo test --release --locked --no-run --test device --message-format=json-render-diagnostics)
  echo "$built" | sed -n 's/.*"name":"device".*"executable":"\([^"]*\)".*/\1/p'
  exit
fi

binary=${1:?usage: run.sh build, or run.sh BINARY [FILTER]}
shift
results=tests/device/results
mkdir -p "$results"
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr -c 'A-Za-z0-9\n' -)
table="$results/${name:-no-gpu}${1:+-$(echo "$1" | tr -c 'A-Za-z0-9\n' -)}.txt"
# 14: more than 30,000 tokens through scripted drafters.
status=0
TALON_SOAK=${TALON_SOAK:-14} "$binary" --nocapture --test-threads=1 "$@" >"$table" 2>&1 || status=$?
cat "$table"
echo "written to $table"
if grep -q 'skipped: ' "$table"; then
  echo "run.sh: tests were skipped" >&2
  exit 1
fi
exit "$status"
