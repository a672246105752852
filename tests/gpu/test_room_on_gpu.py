"""Decoding plans its device memory, which does not grow."""

import gc
import os
import random as plain_random
from pathlib import Path

import pytest
import torch

from helpers import DEVICE
from scheduling import GREEDY, NARROW, Alone, Task, draw_tasks, make, run, run_mixed, scheduler
from writehead.config import DecodeConfig
from writehead.cost import Setting, sentence_bytes
from writehead.engine import scheduler as scheduling
from writehead.errors import OutOfRoom

pytestmark = pytest.mark.gpu

MiB = 1 << 20
REQUESTS, FIRST = 10_000, 2_000
TINY = {"vocab_size": 301, "d": 32, "f": 48, "h": 4, "k": 16, "v": 16, "decoder_layers": 1}
TINY |= {"source_positions": 80, "target_positions": 72}
# 32 KiB of K and V per position
WIDE = {"vocab_size": 512, "d": 128, "f": 128, "h": 8, "g": 8, "k": 128, "v": 128}
WIDE |= {"decoder_layers": 8, "target_positions": 256}


def held() -> tuple[int, int, int]:
    """Bytes of tensors, of the device, and of this process."""
    torch.cuda.synchronize()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_ten_thousand_requests_decode_as_alone_and_use_no_more_memory():
    made = make("translation", **TINY)
    configs = [GREEDY, *NARROW, DecodeConfig(beam=4, n_best=2)]
    alone, kinds = Alone(made), draw_tasks(made, configs, 100, longest=70, limit=20)
    tasks = plain_random.Random(0).choices(kinds, k=REQUESTS)
    loop = scheduler(made.to(DEVICE), batch_tokens=100 * (80 + 72))
    done = run_mixed(loop, [*kinds, *tasks[:FIRST]], cancels=0.1, most=60)
    before = held()
    done += run_mixed(loop, tasks[FIRST:], seed=1, cancels=0.1, most=60)
    allocated, reserved, host = (now - then for now, then in zip(held(), before, strict=True))
    assert allocated <= MiB, f"{allocated:,} bytes of tensors more"
    assert reserved <= 32 * MiB, f"{reserved:,} bytes of the device more"
    assert host <= 128 * MiB, f"{host:,} bytes of the host more"
    for one in done:
        alone.check(*one, 1e-3)


@pytest.fixture
def empty_device():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def decode(loop: scheduling.Scheduler, task: Task) -> None:
    [(_, request)] = run_mixed(loop, [task])
    assert len(request.result()[0].tokens) == task.max_length


@pytest.mark.parametrize(("task", "beam"), [("translation", 4), ("language", 1)])
def test_lanes_use_the_planned_memory(monkeypatch, empty_device, task, beam):
    encoder = {"source_positions": 256} if task == "translation" else {}
    made = make(task, torch.bfloat16, **(WIDE | encoder)).to(DEVICE)
    made.tokens.weight.data[made.config.eos] = 0.0
    small, large = (
        Task((3,) * 9, DecodeConfig(beam=beam, min_length=length), length) for length in (9, 248)
    )
    monkeypatch.setattr(scheduling, "available_memory", lambda device: 1e9)
    loop, before = scheduler(made.pack(), graphs=False), torch.cuda.memory_allocated()
    decode(loop, small)
    used = torch.cuda.memory_allocated() - before
    assert 0.6e9 <= used <= 1.02e9  # one slot more is never used
    source = 9 if task == "translation" else 0
    fits = Setting(1, source, target=64, beam=beam)
    loop.memory = sentence_bytes(made.config, fits)
    longest = 64 if source else 56  # the prompt is in the cache too
    with pytest.raises(OutOfRoom, match=rf"9 \+ 248 tokens.*max_length={longest}"):
        loop.submit([large.request()])
    assert torch.cuda.memory_allocated() - before == used
    decode(loop, small)


def test_a_device_without_memory_is_an_error(empty_device):
    made = make("language", torch.bfloat16, **WIDE).to(DEVICE)
    total, loop = torch.cuda.get_device_properties(0).total_memory, scheduler(made, graphs=False)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1e8) / total)
    request = Task((3,) * 9, DecodeConfig(min_length=20), 20).request()
    loop.submit([request])
    with pytest.raises(OutOfRoom, match="ran out of memory"):
        run(loop, [request])
