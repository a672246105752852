#!/usr/bin/env bash
# Measures the decoding figures of README and docs on one GPU, in about 25 minutes.
#
# Usage: results/measure.sh TEXT [OUTPUT]
#
# TEXT is a file of English lines, such as newstest2014.en. New files go to OUTPUT, by default
# measured/; compare them with results/ and replace the old ones. Files that exist are skipped, so
# an interrupted run can be resumed.
set -euo pipefail
text=$(realpath "${1:?usage: results/measure.sh TEXT [OUTPUT]}")
cd "$(dirname "$0")/.."
output=${2:-measured}
mkdir -p "$output/decoding"

measure() {
  local file=$output/decoding/$1.json
  shift
  [ -s "$file" ] && ! grep -q '"partial": true' "$file" && return
  PYTHONPATH=src python3 -m writehead bench "$@" --output "$file"
}

measure decode-table2 decode --batch 1024 --no-peers
measure decode-few decode --preset wmt14/multi-query --batch 128 --batch 16 --batch 1 --no-peers
measure decode-sampling decode --preset lm1b/multi-query --batch 256 --length 256 --beam 1 \
  --sampling --no-peers
long=$(mktemp -d)/long.en
trap 'rm -rf "$(dirname "$long")"' EXIT
for _ in {1..20}; do cat "$text"; done | shuf --random-source="$text" > "$long"
measure translate translate --input "$long" --no-peers
PYTHONPATH=src python3 -m writehead reproduce table2 --results "$output"
measure decode-systems decode --preset wmt14/multi-head --preset wmt14/multi-query \
  --batch 1024 --batch 1 --batch 128 --batch 8 --beam 1 --beam 4 --repeats 3
measure decode-context decode --preset lm1b --length 8192 --length 32768 --batch 16
measure attention attention
