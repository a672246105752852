#!/usr/bin/env bash
# Measures the server on one GPU: many clients, and continuous against static batching.
#
# Usage: results/measure-serving.sh [OUTPUT [RUN…]]
#
# New files go to OUTPUT, by default measured/serving. Without a RUN, models of 53M and 211M
# parameters with random weights are created there. Files that exist are skipped. After seven
# minutes, no further measurement is started, and the exit code is 3: run the command again to
# continue. For a quick test, set CLIENTS, DURATION, SWEEP (numbers of clients), SWEEP_DURATION, PRESETS and DEVICE.
set -euo pipefail
output=$(realpath -m "${1:-measured/serving}")
[ $# -gt 0 ] && shift
runs=()
for run in "$@"; do runs+=("$(realpath "$run")"); done
cd "$(dirname "$0")/.."
export PYTHONPATH=src
python=${PYTHON:-python3}
clients=${CLIENTS:-256} duration=${DURATION:-60}
sweep=${SWEEP:-16 64 256 1024} sweep_duration=${SWEEP_DURATION:-15}
device=${DEVICE:-cuda}
mkdir -p "$output"

if [ ${#runs[@]} = 0 ]; then
  for preset in ${PRESETS:-wmt14-small/multi-query wmt14/multi-query}; do
    run=$output/models/${preset//\//-}
    [ -d "$run" ] || "$python" - "$preset" "$run" << 'PYTHON'
import sys
from dataclasses import replace

import torch

from writehead import Engine, make_model, preset, save_run
from writehead.runs.bundled import bundled_run

torch.manual_seed(0)
config, bundled = preset(sys.argv[1]), Engine.load(device="cpu").model.config
config = replace(config, vocab_size=max(config.vocab_size, bundled.vocab_size))
save_run(sys.argv[2], make_model(config), tokenizer=bundled_run())
PYTHON
    runs+=("$run")
  done
fi

measure() {
  local file=$output/$1.json
  shift
  [ -s "$file" ] && ! grep -q '"partial": true' "$file" && return
  if [ $SECONDS -gt 420 ]; then
    echo "run the command again to continue with $file" >&2
    exit 3
  fi
  "$python" -m writehead bench serve "$@" --output "$file" --force
}

batchings=(--batching continuous --batching static)
has_peer=$("$python" -c "
import ctranslate2
print(int('$device' == 'cpu' or ctranslate2.get_cuda_device_count() > 0))" 2> /dev/null || echo none)
[ "$has_peer" = 1 ] && batchings+=(--batching ctranslate2)
loads=()
for count in $sweep; do loads+=(--max-concurrency "$count"); done

for run in "${runs[@]}"; do
  name=$(basename "$run")
  one=("$run" --device "$device" --languages en-de)
  for beam in 1 4; do
    measure "clients-$name-beam$beam" "${one[@]}" --beam $beam \
      --max-concurrency "$clients" --duration "$duration"
    measure "batching-$name-beam$beam" "${one[@]}" --beam $beam "${batchings[@]}" "${loads[@]}" \
      --duration "$sweep_duration" --no-check
  done
  # a request with many texts takes less HTTP time per text
  measure "lists-$name" "${one[@]}" --max-concurrency "$clients" --texts-per-request 16 \
    --duration "$duration"
  measure "clients-$name-float32" "${one[@]}" --dtype float32 --max-concurrency "$clients" \
    --duration "$duration"
  [ "$has_peer" = 0 ] && measure "ctranslate2-$name-cpu" "${one[@]}" --device cpu \
    --batching ctranslate2 --max-concurrency 16 --duration "$sweep_duration"
done
exit 0
