"""In float32, captured graphs on a GPU find the tokens of the plain path on a CPU."""

import pytest
import torch

from texts import sentences
from writehead.config import DecodeConfig
from writehead.engine import Engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("beam", [1, 4])
def test_float32_translations_on_gpu_equal_those_on_cpu(beam):
    lines, options = sentences(30, longest=20), DecodeConfig(beam=beam)
    engines = (Engine.load(None, device, torch.float32) for device in ("cuda", "cpu"))
    gpu, cpu = ([one.text for one in engine.translate(lines, options)] for engine in engines)
    assert gpu == cpu
