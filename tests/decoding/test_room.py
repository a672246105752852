"""What captured decoding does where a device's memory, or a kernel's room, is too small."""

import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from helpers import config, model, tokens
from writehead import cost
from writehead.config import DecodeConfig
from writehead.decoding.batching import Batching, Job
from writehead.decoding.worker import Worker
from writehead.errors import OutOfRoom

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
Buffers = graphs.Buffers

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


def test_nothing_of_a_first_attempt_is_held_during_the_second(small_device, monkeypatch):
    """A batch whose memory ran out halfway must not be in its own way."""
    made, alive = decoder(), []

    class Held:
        pass

    def start(*_: object) -> Held:
        held = Held()
        alive.append((weakref.ref(held), [ref() for ref, _ in alive]))
        return held

    def run(*_: object) -> None:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(made, "start", start)
    monkeypatch.setattr(made, "run", run)
    with pytest.raises(OutOfRoom):
        made.search(tokens(2, 5), [5, 5], 6, DecodeConfig(max_length=6), end=1)
    assert [before for _, before in alive] == [[], [None]]


@pytest.mark.parametrize("beam", [1, 2])
def test_prompts_are_read_some_rows_at_a_time_as_all_at_once(monkeypatch, beam):
    sizes = config("language", d=32, k=16, v=16, window=4)
    made = graphs.GraphDecoder(model(sizes, dtype=torch.float32))
    prompts, lengths = tokens(5, 7), torch.tensor([7, 1, 3, 6, 2])
    shape = made._shape(5, 7, 9, DecodeConfig(beam=beam))
    read = []
    for together in (1 << 15, 14):  # all, and two of them
        monkeypatch.setattr(graphs, "PROMPTS", together)
        buffers = Buffers(shape, sizes, 37, torch.float32, torch.device("cpu"))
        first = made._read_prompts(prompts, lengths, buffers)
        assert torch.equal(first, prompts[range(5), lengths - 1])
        read.append(buffers.cache)
    assert_close(read[0].K, read[1].K)
    assert_close(read[0].V, read[1].V)
    assert read[0].K[:, : 5 * beam : beam].any(dim=-1).any()
