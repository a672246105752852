"""The device memory of captured decoding does not grow, and its limit is predicted."""

import gc
import os
import random as plain_random
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import DEVICE, config, model
from writehead.config import DecodeConfig
from writehead.errors import OutOfRoom
from writehead.model import LanguageModel, TranslationModel

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

EOS, VOCABULARY = 1, 301
BATCHES, FIRST = 10_000, 1_000
SIZES, BEAMS = (1, 9, 17, 23, 31, 40), (1, 4)
MiB = 1 << 20


def tiny() -> TranslationModel:
    """A model with random weights that ends some of its texts."""
    sizes = {"vocab_size": VOCABULARY, "d": 32, "f": 48, "h": 4, "k": 16, "v": 16}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"source_positions": 80, "target_positions": 72}
    made = model(config("translation", **sizes), dtype=torch.float32)
    with torch.no_grad():
        made.tokens.weight[EOS] *= 2.0
    return made.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def decode(decoder, draw: plain_random.Random, rows: int, beam: int, *, rare: bool = False) -> None:
    """Decodes short sentences; rare shapes are longer and have two hypotheses each."""
    longest = draw.randint(65, 80) if rare else draw.randint(1, 24)
    lengths = [longest, *(draw.randint(1, longest) for _ in range(rows - 1))]
    tokens = torch.randint(2, VOCABULARY, (rows, longest), device=DEVICE)
    n_best = 2 if rare and beam > 1 else 1
    options = DecodeConfig(max_length=draw.randint(1, 6), beam=beam, n_best=n_best)
    capacity = 72 if rare else options.max_length
    assert len(decoder.search(tokens, lengths, capacity, options, eos=EOS)) == rows


def decode_mixed(decoder, count: int, seed: int) -> None:
    """Decodes random batches, one in fifty of a rare shape, then one of every common shape."""
    draw = plain_random.Random(seed)
    for i in range(count):
        decode(decoder, draw, draw.choice(SIZES), draw.choice(BEAMS), rare=i % 50 == 49)
    for rows, beam in product(SIZES, BEAMS):
        decode(decoder, draw, rows, beam)


def host_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_ten_thousand_batches_use_no_more_memory_than_a_thousand(monkeypatch):
    # as many graphs as common shapes, so that every rare one evicts another
    monkeypatch.setattr(graphs, "MOST_GRAPHS", len(SIZES) * len(BEAMS))
    decoder = graphs.GraphDecoder(tiny())

    def held() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host_bytes()

    decode_mixed(decoder, FIRST, seed=0)
    before = held()
    decode_mixed(decoder, BATCHES - FIRST, seed=1)
    allocated, reserved, host = (now - then for now, then in zip(held(), before, strict=True))
    assert allocated <= MiB, f"{allocated:,} bytes of tensors more"
    assert reserved <= 32 * MiB, f"{reserved:,} bytes of the device more"
    assert host <= 128 * MiB, f"{host:,} bytes of the host more"


def wide(task: str) -> TranslationModel | LanguageModel:
    """A model with few weights and a large cache: 4 KiB of K and V per position and layer."""
    sizes = {"vocab_size": 512, "d": 128, "f": 128, "h": 8, "g": 8, "k": 128, "v": 128}
    sizes |= {"decoder_layers": 8, "target_positions": 256}
    if task == "translation":
        sizes |= {"encoder_layers": 1, "source_positions": 256}
    return model(config(task, **sizes), dtype=torch.bfloat16).to(DEVICE)


def prompts(count: int, length: int) -> tuple[Tensor, list[int]]:
    return torch.randint(2, 512, (count, length), device=DEVICE), [length] * count


@pytest.fixture
def empty_device(monkeypatch):
    """Frees unused device memory, and rounds batches up to multiples of 16 only."""
    monkeypatch.setattr(graphs, "_round_rows", lambda rows: -(-rows // 16) * 16)
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("task", "length", "beam"),
    [("translation", 256, 1), ("translation", 64, 4), ("language", 250, 1)],
)
def test_the_largest_batch_is_predicted_within_ten_percent(empty_device, task, length, beam):
    decoder = graphs.GraphDecoder(wide(task))
    options = DecodeConfig(max_length=2, beam=beam)
    predicted = decoder.largest_batch(length, 256, beam)
    fits = int(0.9 * predicted)
    assert len(decoder.search(*prompts(fits, length), 256, options, eos=EOS)) == fits
    with pytest.raises(OutOfRoom, match=f"about {predicted} do"):
        decoder.search(*prompts(int(1.1 * predicted), length), 256, options, eos=EOS)
    assert len(decoder.search(*prompts(16, length), 256, options, eos=EOS)) == 16
