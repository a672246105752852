"""Captured decoding on a GPU: the tokens of the plain path, and small errors."""

import copy
import logging
from functools import partial

import numpy as np
import pytest
import torch

from helpers import DEVICE, assert_at_most_twice, tokens
from scheduling import (
    EOS,
    GREEDY,
    NARROW,
    Alone,
    draw_tasks,
    hypotheses,
    make,
    run,
    run_mixed,
    scheduler,
)
from texts import engine, sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.engine import Engine
from writehead.engine.runner import Lane, Shape
from writehead.engine.search import Options, Targets

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3  # of scores, sums of float32 log-probabilities
SIZES = {"vocab_size": 501, "d": 128, "f": 192, "h": 8, "k": 16, "v": 32, "decoder_layers": 2}
SIZES |= {"target_positions": 64}
KINDS = {
    "multi-query": {},
    "multi-head": {"g": 8, "norm": "layer", "bias": True, "activation": "gelu"},
    "grouped-query": {"g": 2, "positions": "rotary", "gated": True, "activation": "silu"},
    "local": {"window": 5, "norm_place": "post", "positions": "sinusoidal", "tied": False},
}
SLOTS = 20 * (40 + 64)  # tokens in a lane: 20 slots, or five of beam 4


def sized(task: str, kind: str = "multi-query", dtype: torch.dtype = torch.float32, **changes):
    encoder = {"encoder_layers": 2, "source_positions": 40} if task == "translation" else {}
    return make(task, dtype, **(SIZES | KINDS[kind] | encoder | changes))


@pytest.mark.parametrize(
    ("task", "kind"),
    [*(("translation", kind) for kind in KINDS), *(("language", kind) for kind in [*KINDS][2:])],
)
def test_captured_steps_decode_requests_as_alone(task, kind):
    made = sized(task, kind)
    alone, loop = Alone(made), scheduler(made.to(DEVICE), batch_tokens=SLOTS)
    configs = [GREEDY, GREEDY, *NARROW, DecodeConfig(beam=4, n_best=3)]
    tasks = draw_tasks(made, configs, 40, longest=31, limit=24)
    for done in (*run_mixed(loop, tasks[:1]), *run_mixed(loop, tasks)):
        alone.check(*done, TOLERANCE)


def test_repeated_searches_are_bit_exact():
    made = sized("translation", dtype=torch.bfloat16).to(DEVICE)
    loop, results = scheduler(made), []
    tasks = draw_tasks(made, [GREEDY, NARROW[0], DecodeConfig(beam=4, n_best=2)], 90, longest=31)
    for _ in range(2):
        requests = [task.request() for task in tasks]
        loop.submit(requests)
        run(loop, requests)
        results.append([hypotheses(request) for request in requests])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        *(("multi-query", rows) for rows in (1, 16, 32, 200)),
        *((kind, rows) for kind in ("multi-head", "grouped-query") for rows in (1, 32)),
    ],
)
@torch.no_grad()
def test_bfloat16_logits_err_at_most_twice_as_much_as_the_plain_step(kind, rows, monkeypatch):
    from writehead.ops.launch import compile_kernels

    made = sized("translation", kind, torch.bfloat16).to(DEVICE)
    exact, packed = copy.deepcopy(made).double(), copy.deepcopy(made).pack()
    source, slots = tokens(rows, 31, vocab_size=501).to(DEVICE), range(rows)
    lengths = torch.arange(rows, device=DEVICE) % 30 + 1
    lane = Lane(packed, Shape(rows, 1, 31, 16), Targets(501, EOS))
    lane.encode(slots, [row[:n] for row, n in zip(source.tolist(), lengths.tolist(), strict=True)])
    lane.admit(slots, [Options(GREEDY, 16)] * rows, 0)
    listed = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    decode = partial(packed.decode, lane.search.tokens, lane.cache, lane.memory, listed)
    if DEVICE == "cuda":
        compile_kernels(decode)
    fed, ours = tokens(7, rows, vocab_size=501).to(DEVICE), []
    for one in fed:
        lane.search.tokens[:rows] = one
        ours.append(decode().double())
        lane.cache.lengths[:rows] += 1
    monkeypatch.setattr("writehead.ops.linear._choose", lambda *given: "reference")
    plain, expected = (
        [model.step(one, state).double() for one in fed]
        for model in (made, exact)
        for state in [model.start(source, 16, source_lengths=lengths)]
    )
    assert_at_most_twice(*(torch.stack(some) for some in (ours, plain, expected)))


def test_the_first_step_compiles_all_its_kernels_in_parallel(monkeypatch):
    compiled: dict[str, bool] = {}  # by kernel: whether it was always compiled in parallel

    def record(*args, fn, **options):
        in_parallel = triton.runtime._async_compile.active_mode.get() is not None
        compiled[fn.name] = compiled.get(fn.name, True) and in_parallel

    made = sized("translation", dtype=torch.bfloat16, d=88, f=104, vocab_size=777)  # used once
    made = made.to(DEVICE).pack()
    lane = Lane(made, Shape(3, 4, 9, 16), Targets(777, EOS))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record)
    lane.encode(
        range(3), [row[:n] for row, n in zip(tokens(3, 9).tolist(), (9, 2, 5), strict=True)]
    )
    lane.admit(range(3), [Options(GREEDY, 9)] * 3, 0)
    lane.step(np.arange(3, dtype=np.int32))
    assert compiled
    assert [name for name, in_parallel in compiled.items() if not in_parallel] == []


def test_unsupported_heads_are_decoded_step_by_step_with_a_warning(caplog):
    one = Engine(engine("translation").model.to(DEVICE, torch.float32), tokenizer())
    with caplog.at_level(logging.WARNING):
        assert len(list(one.translate(sentences(3), DecodeConfig(max_length=4)))) == 3
    assert "without CUDA graphs" in caplog.text
    assert "powers of two" in caplog.text


@pytest.mark.parametrize("beam", [1, 4])
def test_suppressed_tokens_are_not_chosen_in_graphs(beam):
    options = DecodeConfig(beam=beam)
    made, lines = engine("translation").model.to(torch.float32), sentences(20)
    plain = [one.text for one in Engine(copy.deepcopy(made), tokenizer()).translate(lines, options)]
    likely = [token for text in plain[:3] for token in tokenizer().encode(text)]
    forbidding = copy.copy(tokenizer())
    forbidding.suppressed = tuple({*likely} - {EOS})
    expected = Engine(copy.deepcopy(made), forbidding).translate(lines, options)
    got = [*Engine(made.to(DEVICE), forbidding).translate(lines, options)]
    assert [one.text for one in got] == [one.text for one in expected]
    assert [one.text for one in got] != plain
