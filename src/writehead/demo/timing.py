"""Decoding times of both models in one run, beside what `cost` predicts for this machine.

No time on a shared CPU is stable, so the models take turns and only their ratio is to be trusted.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from writehead import cost
from writehead.config import DecodeConfig
from writehead.decoding import Engine
from writehead.model import LanguageModel, TranslationModel
from writehead.training.throughput import matrix_rate
from writehead.util.devices import wait_for

TURNS = 3
POSITIONS = (15, 63, 127, 255)  # where in a sequence a step is timed
BATCH, SOURCE = 64, 256  # a memory and a batch at which the cache matters


def time_decoding(
    engines: Mapping[str, Engine], sources: list[str], searches: Mapping[str, DecodeConfig]
) -> dict[str, dict[str, float]]:
    """Microseconds a token of translating `sources`, by search and model: the best of its turns."""
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(TURNS):
        for search, options in searches.items():
            for kind, engine in engines.items():
                began = time.perf_counter()
                outputs = list(engine.translate(sources, options))
                seconds = time.perf_counter() - began
                tokens = sum(len(engine.tokenizer.encode(output.text)) + 1 for output in outputs)
                times.setdefault(search, {}).setdefault(kind, []).append(seconds / tokens * 1e6)
    return {
        search: {kind: min(turns) for kind, turns in kinds.items()}
        for search, kinds in times.items()
    }


@torch.inference_mode()
def time_steps(models: Mapping[str, TranslationModel | LanguageModel]) -> dict[str, Any]:
    """Milliseconds of a decoder step at several positions, with a large batch and long memory."""
    device = next(iter(models.values())).device
    chip = _measured(device)
    setting = cost.Setting(BATCH, SOURCE, max(POSITIONS) + 1, element=4)
    found: dict[str, Any] = {
        "batch": BATCH,
        "source": SOURCE,
        "positions": list(POSITIONS),
        "bandwidth": chip.bandwidth,
        "matrix_rate": chip.flops,
        "kinds": {},
    }
    timed = {kind: _step_times(model) for kind, model in models.items()}
    for kind, model in models.items():
        floors = [cost.decoder_step(model.config, setting, p).floor(chip) * 1e3 for p in POSITIONS]
        found["kinds"][kind] = {
            "milliseconds": timed[kind],
            "floor_milliseconds": floors,
            "kv_bytes": cost.kv_bytes(model.config, setting)["total"],
            "kv_bytes_per_token": cost.kv_bytes(model.config, setting)["target_token"],
        }
    return found


def _step_times(model: TranslationModel | LanguageModel) -> list[float]:
    assert isinstance(model, TranslationModel)
    tokens = torch.randint(3, model.config.vocab_size, (BATCH, max(POSITIONS) + 1))
    tokens = tokens.to(model.device)
    state = model.start(tokens[:, :SOURCE], max(POSITIONS) + 1, rewindable=1)
    answer, fed = [], 0
    for position in POSITIONS:
        if position > fed:
            model.extend(tokens[:, fed:position], state)
        times = []
        for _ in range(9):
            wait_for(model.device)
            began = time.perf_counter()
            model.step(tokens[:, position], state)
            wait_for(model.device)
            times.append(time.perf_counter() - began)
            state.rewind(1)  # the same step again
        answer.append(statistics.median(times) * 1e3)
        fed = position
    return answer


def _measured(device: torch.device) -> cost.Chip:
    """This machine as `cost` sees a chip: a large copy, and a matrix product."""
    block = torch.ones(1 << 25, device=device)  # 128 MB
    copy = torch.zeros_like(block)  # written before, so that no page is asked for while timing
    times = []
    for _ in range(5):
        wait_for(device)
        began = time.perf_counter()
        copy.copy_(block)
        wait_for(device)
        times.append(time.perf_counter() - began)
    bandwidth = 2 * copy.nbytes / min(times)
    return cost.Chip("here", 1.0, bandwidth, matrix_rate(device, torch.float32), "measured")
