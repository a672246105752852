"""Text, a tokenizer and small engines."""

import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from helpers import config, model
from writehead.config import Batching
from writehead.data.bpe import BPETokenizer
from writehead.engine import Engine
from writehead.interop.quantize import quantize_run
from writehead.runs import save_run

WORDS = "the a cat dog bird runs sees sings house tree small big red under over with and then now"
ODD = ["", "   ", "\t", "\u200b", "a\x00b", "日本語のテキスト。とても長い。", "🙂🙃 naïve café"]
ODD += ["e\u0301\u0323", "the cat\rruns", "line\u2028separator\x85here", "\ufeffthe dog"]
ODD += ["￿ ﷽ \U0010ffff", "||| <unk> </s> ▁ <0x0A>"]


def sentences(count: int, *, seed: int = 0, longest: int = 7) -> list[str]:
    """Lines of one to `longest` words."""
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(WORDS.split(), k=draw.randint(1, longest))) + "."
        for _ in range(count)
    ]


@cache
def tokenizer() -> BPETokenizer:
    return BPETokenizer.train(sentences(400), 300)


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


def save_small_runs(folder: Path) -> Path:
    """Saves a run per task, `translation` and `language`, and the first one `quantized`."""
    tokenizer().save(folder / "tokenizer")
    for task in ("translation", "language"):
        save_run(folder / task, engine(task).model.float(), tokenizer=folder / "tokenizer")
    quantize_run(folder / "translation", folder / "quantized")
    return folder


def names(folder: Path) -> list[str]:
    """The names in a folder."""
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Makes writes fail after `limit` bytes of a file, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
