"""What captured decoding does where a device's memory, or a kernel's room, is too small."""

import logging
from types import SimpleNamespace

import pytest
import torch

from helpers import config, model, tokens
from writehead import cost
from writehead.config import DecodeConfig
from writehead.decoding.batching import Batching, Job
from writehead.decoding.worker import Worker
from writehead.errors import OutOfRoom

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")

MEMORY = 3_000_000


@pytest.fixture
def small_device(monkeypatch):
    """A GPU of MEMORY bytes, of which the decoder only asks the size."""
    device = SimpleNamespace(total_memory=MEMORY)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def decoder() -> "graphs.GraphDecoder":
    return graphs.GraphDecoder(model(config("translation", d=32, k=16, v=16), dtype=torch.float32))


def failing(monkeypatch, made: "graphs.GraphDecoder", times: int) -> list[int]:
    """Lets the memory run out at the first so many attempts; says which were made."""
    attempts: list[int] = []

    def start(*_: object) -> str:
        attempts.append(len(made._captured))
        if len(attempts) <= times:
            raise torch.OutOfMemoryError("too much")
        return "captured"

    monkeypatch.setattr(made, "start", start)
    monkeypatch.setattr(made, "run", lambda *_: [["found"]])
    return attempts


def test_memory_that_other_shapes_held_is_given_back_and_tried_again(small_device, monkeypatch):
    made = decoder()
    made._captured["another shape"] = SimpleNamespace()
    attempts = failing(monkeypatch, made, times=1)
    found = made.search(tokens(2, 5), [5, 5], 6, DecodeConfig(max_length=6), end=1)
    assert found == [["found"]]
    assert attempts == [1, 0]


def test_a_batch_that_does_not_fit_names_the_largest_that_does(small_device, monkeypatch):
    made = decoder()
    assert len(failing(monkeypatch, made, times=2)) == 0
    with pytest.raises(OutOfRoom, match="900 sentences of 5") as raised:
        made.search(tokens(900, 5), [5] * 900, 6, DecodeConfig(max_length=6), end=1)
    named = int(str(raised.value).split("about ")[1].split()[0])
    sizes = made.model.config
    shape = made._shape(1, 5, 6, DecodeConfig())
    setting = cost.Setting(1, shape.source, shape.capacity, element=4)
    chip = cost.Chip("small", MEMORY, 1.0, 1.0, "a test")
    assert 0 < graphs._round_rows(named) <= cost.largest_batch(sizes, setting, chip)
    assert graphs._round_rows(named + 1) > cost.largest_batch(sizes, setting, chip)


def test_a_beam_wider_than_the_kernels_goes_step_by_step_and_says_so(caplog):
    worker = Worker(model(config("translation")), 37, Batching())
    narrow, asked = DecodeConfig(beam=2, max_length=4), []
    worker._graphs = SimpleNamespace(
        largest_beam=2, search=lambda *_, **named: asked.append(named) or [["by graphs"]]
    )
    assert worker._search([Job([5, 1], 4)], narrow) == [["by graphs"]]
    assert len(asked) == 1
    with caplog.at_level(logging.WARNING):
        found = worker._search([Job([5, 1], 4)], DecodeConfig(beam=3, max_length=4))
    assert found is not None
    assert len(asked) == 1
    assert "beam=3 goes step by step" in caplog.text


def test_what_does_not_fit_is_said_and_answered_with_nothing(caplog):
    worker = Worker(model(config("translation")), 37, Batching())

    def search(*_: object, **__: object) -> None:
        raise OutOfRoom("8 sentences do not fit, and about 5 do")

    worker._graphs = SimpleNamespace(largest_beam=4, search=search)
    with caplog.at_level(logging.WARNING):
        assert worker._search([Job([5, 1], 4)], DecodeConfig(max_length=4)) is None
    assert "about 5 do" in caplog.text
