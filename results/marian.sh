#!/usr/bin/env bash
# Measures decoding with Marian models and their multi-query conversions, in about 8 minutes.
#
# Usage: results/marian.sh [OUTPUT] [OPTION...]
#
# The models have random weights, and the sizes of OPUS-MT's base and big models. OUTPUT is by
# default measured/. The models are kept in OUTPUT/models, and the times are written to
# OUTPUT/decoding/decode-marian.json. Each OPTION is passed to `writehead bench decode`.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-measured}
shift || true
export PYTHONPATH=src TRANSFORMERS_VERBOSITY=error
mkdir -p "$output/decoding" "$output/models"

python3 - "$output/models" << 'END'
import sys
from pathlib import Path

import torch
from transformers import MarianConfig, MarianMTModel

models = {  # vocabulary, d, d_ff, heads, positions, activation
    "marian-base": (58_101, 512, 2048, 8, 512, "swish"),
    "marian-big": (57_830, 1024, 4096, 16, 1024, "relu"),
}
for name, (vocab_size, d, f, h, positions, activation) in models.items():
    folder = Path(sys.argv[1]) / name
    if (folder / "config.json").is_file():
        continue
    sides = {
        f"{side}_{field}": value
        for side in ("encoder", "decoder")
        for field, value in (("layers", 6), ("attention_heads", h), ("ffn_dim", f))
    }
    pad = vocab_size - 1
    config = MarianConfig(
        vocab_size=vocab_size,
        d_model=d,
        max_position_embeddings=positions,
        activation_function=activation,
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        **sides,
    )
    torch.manual_seed(0)
    MarianMTModel(config).to(torch.bfloat16).save_pretrained(folder)
END

runs=()
for size in base big; do
  original=$output/models/marian-$size
  [ -d "$original-multi-query" ] || python3 -m writehead convert "$original" \
    "$original-multi-query" --write-heads 1 --method mean
  runs+=(--run "$original" --run "$original-multi-query")
done
python3 -m writehead bench decode "${runs[@]}" --batch 1 --batch 32 --batch 512 --repeats 3 \
  --output "$output/decoding/decode-marian.json" "$@"
