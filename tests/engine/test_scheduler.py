"""A request decodes to the same result in any slot, batch and step as alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import DEVICE
from scheduling import (
    BEAMS,
    EOS,
    GREEDY,
    SAMPLING,
    Alone,
    Task,
    draw_tasks,
    hypotheses,
    make,
    run,
    run_mixed,
    scheduler,
)
from texts import engine, sentences
from writehead.config import DecodeConfig
from writehead.cost import Setting, sentence_bytes
from writehead.engine import Engine, runner
from writehead.engine import scheduler as scheduling
from writehead.errors import OutOfRoom, SearchError
from writehead.ops import attention
from writehead.ops.cpu_weights import why_not_int8
from writehead.util import segments

ALL = [GREEDY, *SAMPLING, *BEAMS]
KINDS = {
    "multi-query": {},
    "multi-head, layer norm": {"g": 6, "norm": "layer", "bias": True, "activation": "gelu"},
    "local": {"g": 2, "window": 4, "tied": False},
    "rotary, gated": {"k": 6, "positions": "rotary", "gated": True, "activation": "silu"},
    "relative": {"positions": "relative", "relative_distance": 17, "attention_scale": 1.0},
    "post-norm": {"norm_place": "post", "positions": "sinusoidal", "norm": "layer", "bias": True}
    | {"output_bias": True, "embedding_scale": 3.0, "position_offset": 2},
}
TASKS = ("translation", "language")
FEW_SLOTS = 5 * (19 + 23)  # tokens in a lane: five slots, or two of beam 2, or one of beam 3

every_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture
def two_threads():
    """Two threads divide even a single product."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# with a dense fraction of 0, steps never list their slots, and with 2, always
@pytest.mark.parametrize(
    ("kind", "task", "dense"),
    [(*case, dense) for case, dense in zip(product(KINDS, TASKS), cycle([0.0, 0.75, 2.0]))],
)
def test_requests_decode_as_alone(monkeypatch, kind, task, dense):
    monkeypatch.setattr(runner, "DENSE_FRACTION", dense)
    monkeypatch.setattr(attention, "GROUP_TOKENS", 7)  # several groups of sources
    made = make(task, torch.float64, **KINDS[kind])
    alone, loop = Alone(made), scheduler(made, batch_tokens=FEW_SLOTS)
    tasks = 2 * draw_tasks(made, ALL, 27)
    done = run_mixed(loop, tasks, cancels=0.2)
    assert 30 < len(done) < 54
    for one in done:
        alone.check(*one)
    found = [one for task in tasks for one in alone.decode(task)]
    assert {one.finished for one in found} == {True, False}
    assert len({len(one.tokens) for one in found}) > 5
    assert 0.3 < loop.stats.loaded_rows / loop.stats.loaded_slots <= 1.0


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.usefixtures("interpreted")
# the kernels compute with minus infinity
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    ("task", "changes", "configs"),
    [
        ("translation", {}, [GREEDY, SAMPLING[2], BEAMS[0]]),
        ("translation", {"norm": "layer", "bias": True, "g": 4}, [SAMPLING[3], BEAMS[0]]),
        ("translation", {"norm_place": "post", "positions": "sinusoidal"}, [BEAMS[1], GREEDY]),
        ("language", {"window": 3}, [GREEDY, SAMPLING[1], BEAMS[0]]),
        ("language", {"positions": "rotary", "gated": True, "activation": "silu"}, ALL[:3]),
    ],
)
def test_requests_decode_as_alone_with_kernels(monkeypatch, task, changes, configs):
    monkeypatch.setattr(runner, "DENSE_FRACTION", 2.0)
    sizes = {"k": 16, "v": 16, "h": 4, "d": 16, "decoder_layers": 1}
    made = make(task, **(sizes | changes))
    alone = Alone(made)
    loop = scheduler(made.to(DEVICE), batch_tokens=6 * (19 + 23), graphs=False)
    for done in run_mixed(loop, draw_tasks(made, configs, 6, longest=5, limit=4)):
        alone.check(*done)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40).map(np.array), st.integers(1, 200))
def test_sources_of_similar_lengths_are_padded_together(lengths, tokens):
    groups = segments.group_by_length(lengths, tokens)
    assert sorted(np.concatenate(groups)) == [*range(len(lengths))]
    for group, following in pairwise(groups):
        next_length = lengths[following].min()
        assert lengths[group].max() <= next_length
        assert len(group) * next_length >= tokens
    for group in groups:
        own = lengths[group].tolist()
        late = [length for i, length in enumerate(own) if i * length >= tokens]
        assert all(length <= segments.PADDED_RATIO * own[0] for length in late)


def test_sizes_of_lanes_and_of_the_vocabulary_change_nothing(monkeypatch):
    monkeypatch.setattr(scheduling, "MIN_POSITIONS", 2)
    made = make("language")
    alone, tasks = Alone(made, vocab_size=21), draw_tasks(made, ALL, 30)
    tasks.sort(key=lambda task: len(task.tokens) + task.max_length)  # the lanes grow
    tasks = [replace(task, tokens=tuple(t % 19 + 2 for t in task.tokens)) for task in tasks]
    for tokens in (None, 1, 400):
        for done in run_mixed(scheduler(made, vocab_size=21, batch_tokens=tokens), tasks):
            alone.check(*done)


@pytest.mark.skipif(
    torch.cuda.is_available() or why_not_int8(torch.zeros(1)) is not None, reason="needs fbgemm"
)
@pytest.mark.parametrize("kind", ["multi-query", "multi-head, layer norm", "local"])
@pytest.mark.usefixtures("two_threads")
@every_task
def test_batches_do_not_change_a_bit_with_int8_weights(monkeypatch, kind, task):
    monkeypatch.setattr(scheduling, "PREFILL_TOKENS", {"cpu": 60})
    sizes = {"d": 48, "f": 96, "k": 32, "v": 32, "target_positions": 110}
    if task == "translation":
        sizes["source_positions"] = 100
    made = make(task, **(KINDS[kind] | sizes)).pack(int8=True)
    tasks = draw_tasks(made, [GREEDY, SAMPLING[1], BEAMS[1]], 21, longest=70, limit=40)
    results = []
    for tokens in (None, 1, 600):
        loop, requests = scheduler(made, batch_tokens=tokens), [one.request() for one in tasks]
        loop.submit(requests)
        run(loop, requests)
        results.append([hypotheses(request) for request in requests])
    assert results[0] == results[1] == results[2]
    assert len({len(result[0].tokens) for result in results[0]}) > 5


def test_a_larger_request_waits_for_a_larger_lane(monkeypatch):
    monkeypatch.setattr(scheduling, "MIN_POSITIONS", 4)
    made = make("language")
    alone, loop = Alone(made), scheduler(made)
    small = Task((3, 4), DecodeConfig(min_length=3), 3)
    large = Task((5, 6, 7), DecodeConfig(min_length=5), 19)
    order, requests = [], [task.request() for task in (small, large, small)]
    for i, request in enumerate(requests):
        request.on_done = partial(order.append, i)
        loop.submit([request])
        loop.step()
    run(loop, requests)
    assert order == [0, 2, 1]
    for task, request in zip((small, large, small), requests, strict=True):
        alone.check(task, request)


@pytest.mark.parametrize(
    ("tokens", "changes"), [(1, {}), (7, {"window": 4}), (40, {"positions": "rotary", "k": 6})]
)
def test_prompts_are_prefilled_in_pieces_between_steps(monkeypatch, tokens, changes):
    made = make("language", torch.float64, **changes)
    alone, first = Alone(made), Task((3,), DecodeConfig(min_length=20), 20)
    monkeypatch.setitem(scheduling.PREFILL_TOKENS, "cpu", tokens)
    tasks = draw_tasks(made, ALL, 18, longest=12)
    loop, early = scheduler(made), first.request()
    loop.submit([early])
    loop.step()
    before = loop.stats.steps
    requests = [task.request() for task in tasks]
    loop.submit(requests)
    loop.step()
    assert loop.stats.steps > before  # the first request continued
    run(loop, [early, *requests])
    for task, request in zip([first, *tasks], [early, *requests], strict=True):
        alone.check(task, request)


def test_the_first_token_is_streamed_within_two_steps_of_the_prefill(monkeypatch):
    made = make("language").to(DEVICE)
    monkeypatch.setitem(scheduling.PREFILL_TOKENS, made.device.type, 4)
    steps, streamed, original = [], [], runner.Lane.step

    def count(lane: runner.Lane, slots: object, times: int = 1) -> None:
        steps.append(times)
        original(lane, slots, times)

    monkeypatch.setattr(runner.Lane, "step", count)
    asked = Task(tuple(range(2, 13)), DecodeConfig(min_length=8), 8).request()
    asked.on_tokens = lambda tokens: streamed.append(sum(steps))
    loop = scheduler(made)
    loop.submit([asked])
    run(loop, [asked])
    assert streamed[0] <= 2
    assert len(streamed) == 8


@every_task
def test_a_cancelled_request_frees_its_slot(task):
    made = make(task, torch.float64)
    alone, loop = Alone(made), scheduler(made, batch_tokens=1)  # one slot
    endless = Task((3, 4), DecodeConfig(min_length=18), 18)
    tasks = draw_tasks(made, [GREEDY], 2, limit=4)
    blocking, waiting, *others = (one.request() for one in (endless, endless, *tasks))
    loop.submit([blocking, waiting, *others])
    loop.step()
    loop.cancel(blocking)
    loop.cancel(waiting)
    loop.cancel(waiting)
    run(loop, others)
    assert loop.stats.steps <= 1 + sum(one.max_length for one in tasks)
    for one, request in zip(tasks, others, strict=True):
        alone.check(one, request)
    loop.cancel(others[0])  # has no effect
    alone.check(tasks[0], others[0])


@pytest.mark.parametrize(
    ("task", "config"),
    [("language", GREEDY), ("translation", SAMPLING[0]), *((task, BEAMS[0]) for task in TASKS)],
    ids=str,
)
def test_nan_ends_its_own_request_alone(task, config):
    made = make(task, torch.float64, tied=False)
    with torch.no_grad():
        made.tokens.weight[9] = torch.nan
        made.output.weight[9] = 0.0
        made.output.weight[EOS] = 0.0
    good = Task((3, 4), replace(config, min_length=3), 8, prefix=(7,))
    bad = replace(good, tokens=(3, 9, 4))
    alone, loop = Alone(made, 9), scheduler(made, vocab_size=9, batch_tokens=3 * 42)
    tasks = [good, bad, good, bad, bad, good, good]
    for _ in range(2):  # the second time, in slots that held NaN
        requests = [task.request() for task in tasks]
        loop.submit(requests)
        run(loop, requests)
        for task, request in zip(tasks, requests, strict=True):
            if task is bad:
                with pytest.raises(SearchError, match="look for NaN"):
                    request.result()
            else:
                alone.check(task, request)


@every_task
def test_threads_share_an_engine(task):
    made = engine(task)
    options = [DecodeConfig(beam=1, max_length=9), DecodeConfig(beam=3, n_best=2, max_length=9)]
    options += [DecodeConfig(temperature=1.2, seed=4, max_length=9)]

    def ask(i: int) -> list[list[str]]:
        work = made.translate if task == "translation" else made.generate
        outputs = work(sentences(9, seed=i), options[i % 3])
        return [[one.text for one in output.hypotheses] for output in outputs]

    expected = [ask(i) for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(6))) == expected


def test_a_stream_is_complete_if_other_threads_step():
    made, options = engine("language"), DecodeConfig(max_length=12, min_length=6)
    [expected] = made.generate(["the cat"], options)
    pieces = made.stream("the cat", options)
    first = next(pieces)
    while made.scheduler.step():  # as another thread would
        pass
    assert first + "".join(pieces) == expected.text


def test_requests_that_do_not_fit_raise_before_the_work(monkeypatch):
    made = make("translation", torch.float64)
    fits, large = (Task((3,) * 19, BEAMS[1], length) for length in (16, 17))
    room = sentence_bytes(made.config, Setting(1, source=19, target=16, beam=3, element=8))
    monkeypatch.setattr(scheduling, "available_memory", lambda device: room)
    alone, loop = Alone(made), scheduler(made)
    with pytest.raises(OutOfRoom, match=r"19 \+ 17 tokens with beam=3 .* max_length=16"):
        loop.submit([fits.request(), large.request()])
    assert not loop.step()
    [done] = run_mixed(loop, [fits])
    alone.check(*done)


def test_a_step_that_fails_ends_its_requests_and_no_later_ones(monkeypatch):
    made = make("translation")
    loop, alone = scheduler(made), Alone(made)
    first, second = (draw_tasks(made, [GREEDY, *SAMPLING], 9, seed=seed) for seed in (0, 1))
    requests = [task.request() for task in first]
    loop.submit(requests)
    loop.step()
    with monkeypatch.context() as patch:
        patch.setattr(made, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.step()
    for request in requests:
        assert request.is_done
        if request.error is not None:
            with pytest.raises(SearchError, match="submit it again"):
                request.result()
    for done in run_mixed(loop, second):
        alone.check(*done)


def test_engines_share_a_model_whose_weights_change():
    made, lines = engine("translation"), sentences(3)
    other = Engine(made.model, made.tokenizer)

    def texts(made: Engine) -> list[str]:
        return [output.text for output in made.translate(lines)]

    before = texts(made)
    with torch.inference_mode():
        assert texts(made) == before
    assert texts(made) == texts(other) == before
    pairs = zip(made.translate(lines), other.translate(lines), strict=True)
    assert [one.text == two.text for one, two in pairs] == [True] * 3
    changed = {name: 1.5 * W for name, W in made.model.state_dict().items()}
    outer = torch.nn.ModuleDict({"inner": made.model})
    outer.load_state_dict({f"inner.{name}": W for name, W in changed.items()})
    fresh = engine("translation")
    fresh.model.load_state_dict(changed)
    assert texts(made) == texts(other) == texts(fresh) != before


def test_a_request_cancelled_while_it_is_prefilled_is_not_decoded(monkeypatch):
    monkeypatch.setitem(scheduling.PREFILL_TOKENS, "cpu", 2)
    made = make("language", torch.float64)
    loop, streamed = scheduler(made), []
    task = Task((3, 4, 5, 6, 7), DecodeConfig(min_length=8), 8)
    cancelled, other = task.request(), task.request()
    cancelled.on_tokens = streamed.extend
    loop.submit([cancelled, other])
    loop.step()
    loop.cancel(cancelled)
    run(loop, [other])
    assert not streamed
    assert not cancelled.hypotheses
    Alone(made).check(task, other)


def test_lanes_that_do_not_fit_together_wait_for_each_other(monkeypatch):
    made = make("translation", torch.float64)
    tasks = [Task((3,) * 9, DecodeConfig(beam=beam, min_length=9), 9) for beam in (1, 2)]
    room = sentence_bytes(made.config, Setting(1, source=9, target=9, beam=2, element=8))
    monkeypatch.setattr(scheduling, "available_memory", lambda device: room)
    loop, requests = scheduler(made), [task.request() for task in tasks]
    loop.submit(requests)
    loop.step()
    run(loop, requests)
    for task, request in zip(tasks, requests, strict=True):
        Alone(made).check(task, request)


def test_a_small_call_does_not_wait_for_a_large_one():
    made = make("translation")
    loop = scheduler(made, batch_tokens=FEW_SLOTS)
    many, [small] = draw_tasks(made, [GREEDY], 60), draw_tasks(made, [GREEDY], 1, seed=1)
    requests, late = [task.request() for task in many], small.request()
    loop.submit(requests)
    loop.step()
    loop.submit([late])
    run(loop, [late])
    assert sum(request.is_done for request in requests) < 30
