"""Text, a tokenizer and small engines."""

import random
from functools import cache
from pathlib import Path

import torch

from helpers import config, model
from writehead.data.tokenizer import Tokenizer
from writehead.decoding import Batching, Engine
from writehead.model import quantize_run, save_run

WORDS = "the a cat dog bird runs sees sings house tree small big red under over with and then now"
ODD = [
    "",
    "   ",
    "\t",
    "\u200b",
    "a\x00b",
    "日本語のテキスト。とても長い。",
    "🙂🙃 naïve café",
    "e\u0301\u0323",
    "the cat\rruns",
    "line\u2028separator\x85here",
    "\ufeffthe dog",
    "￿ ﷽ \U0010ffff",
    "||| <unk> </s> ▁ <0x0A>",
]


def sentences(count: int, *, seed: int = 0, longest: int = 7) -> list[str]:
    """Lines of one to `longest` words."""
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(WORDS.split(), k=draw.randint(1, longest))) + "."
        for _ in range(count)
    ]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train(sentences(400), 300)


def engine(task: str, batching: Batching | None = None, **changes: object) -> Engine:
    """A float64 model with random weights whose texts end at different lengths."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 300, "target_positions": 40, "decoder_layers": 1, "logit_scale": 0.2}
    if task == "translation":
        sizes |= {"source_positions": 24, "encoder_layers": 1}
    made = model(config(task, **(sizes | changes)))
    with torch.no_grad():
        made.tokens.weight[1] *= 4.0  # the end token
    return Engine(made, tokenizer(), batching)


def save_small_runs(folder: Path) -> tuple[Path, Path]:
    """A run of a translation model with random weights, and its int8 quantization."""
    tokenizer().save(folder / "tokenizer")
    plain, quantized = folder / "plain", folder / "quantized"
    save_run(plain, engine("translation").model.float(), tokenizer=folder / "tokenizer")
    quantize_run(plain, quantized)
    return plain, quantized
