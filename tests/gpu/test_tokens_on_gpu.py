"""In float32, captured graphs on a GPU find the tokens of the plain path on a CPU."""

import random

import pytest
import torch

from writehead.config import DecodeConfig
from writehead.engine import Engine

pytestmark = pytest.mark.gpu

SUBJECTS = ["The European Commission", "My younger brother", "Nobody", "A small dog", "We"]
VERBS = ["has never seen", "wanted to talk about", "will vote on", "cannot afford", "paid for"]
OBJECTS = ["the new law", "a red house", "coffee and cake", "twelve trains", "this problem"]
ENDINGS = [".", " in 1989.", ", which surprised us.", " because it was late, wasn't it?", "!"]


def varied_lines(count: int) -> list[str]:
    """English lines of up to 60 words."""
    draw = random.Random(0)
    parts = (SUBJECTS, VERBS, OBJECTS)
    lines = ["Hello!", "", "1,234.56 €"]
    while len(lines) < count:
        length = draw.choice((1, 1, 2, 4))
        sentences = (
            " ".join(map(draw.choice, parts)) + draw.choice(ENDINGS) for _ in range(length)
        )
        lines.append(" ".join(sentences))
    return lines


@pytest.mark.parametrize("beam", [1, 4])
def test_float32_translations_on_gpu_equal_those_on_cpu(beam):
    lines, options = varied_lines(50), DecodeConfig(beam=beam, alpha=0.6)
    engines = (Engine.load(None, device, torch.float32) for device in ("cuda", "cpu"))
    gpu, cpu = ([one.text for one in engine.translate(lines, options)] for engine in engines)
    assert gpu == cpu
    assert len(set(gpu)) > 40
