"""Captured decoding on a GPU: the tokens of the plain path, and small errors."""

import logging
import random as plain_random
from dataclasses import replace

import pytest
import torch

from graph_searches import EOS, Batch, Model, assert_same, captured, plain
from helpers import assert_at_most_twice, assert_close_in, config, model, tokens
from texts import engine, sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.decoding import Engine
from writehead.model import TranslationModel

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
fused = pytest.importorskip("writehead.model.fused", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

b, VOCABULARY = 37, 501
TOLERANCE = 1e-3  # of scores, sums of up to 44 float32 log-probabilities
SIZES = {"vocab_size": VOCABULARY, "d": 72, "f": 96, "h": 8, "k": 16, "v": 32}
SIZES |= {"decoder_layers": 2, "target_positions": 64}
KINDS = {
    "multi-query": {},
    "multi-head": {"g": 8},
    "grouped-query, layer norm, biases": {"g": 2, "norm": "layer", "bias": True},
    "multi-query local, gelu": {"window": 5, "activation": "gelu"},
}
TASKS = ("translation", "language")
GREEDY = DecodeConfig(max_length=24, min_length=4)
BEAM = DecodeConfig(max_length=20, min_length=4, beam=4, n_best=3)

both_tasks = pytest.mark.parametrize("task", TASKS)
both_searches = pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])


def make(
    task: str, kind: str = "multi-query", dtype: torch.dtype = torch.float32, **changes: object
) -> Model:
    """A model with random weights that ends some of its texts."""
    sizes = SIZES | KINDS[kind] | changes
    if task == "translation":
        sizes |= {"encoder_layers": 2, "source_positions": 40}
    made = model(config(task, **sizes), dtype=torch.float32)
    with torch.no_grad():
        made.tokens.weight[EOS] *= 2.0
    return made.to("cuda", dtype)


def read(count: int, longest: int, seed: int = 0) -> Batch:
    """Sources or prompts of different lengths, padded."""
    draw = plain_random.Random(seed)
    lengths = [longest, *(draw.randint(1, longest) for _ in range(count - 1))]
    rows = [[draw.randrange(2, VOCABULARY) for _ in range(longest)] for _ in lengths]
    return torch.tensor(rows, device="cuda"), lengths


# rows end one after another, so that the search moves to smaller graphs
LIMITS = {
    "max_lengths": [4 + i % 40 for i in range(b)],
    "prefixes": [[7, 9, 11][: i % 4] for i in range(b)],
}


@both_searches
@pytest.mark.parametrize(
    ("task", "kind", "count", "longest", "limits"),
    [
        *(("translation", kind, b, 31, {}) for kind in KINDS),
        *(("language", kind, b, 9, {}) for kind in ("multi-query", "multi-query local, gelu")),
        *(("translation", "multi-query", count, 12, {}) for count in (1, 2, 16, 20)),
        *((task, "multi-query", b, 9, LIMITS) for task in TASKS),
    ],
)
def test_captured_search_equals_plain_search(task, kind, count, longest, limits, options):
    made = make(task, kind)
    decoder = graphs.GraphDecoder(made)
    if limits:
        options = replace(options, max_length=44, min_length=3, alpha=0.2)
    for seed in (0, int(count < b)):  # the second search replays the graphs of the first
        batch = read(count, longest, seed)
        expected = plain(made, batch, options, **limits)
        assert_same(captured(decoder, batch, options, **limits), expected, TOLERANCE)


@both_searches
def test_repeated_searches_are_bit_exact(options):
    decoder = graphs.GraphDecoder(make("translation", dtype=torch.bfloat16))
    batches = [read(b, longest, seed) for seed, longest in enumerate((31, 20, 9))]
    _, second, third = (
        [list(captured(decoder, one, options)) for one in batches] for _ in range(3)
    )
    assert second == third


def test_the_first_search_compiles_all_kernels_in_rehearsals(monkeypatch):
    triton = pytest.importorskip("triton")
    compiled: dict[str, bool] = {}  # by kernel: whether it was always in a rehearsal

    def record(*args, fn, **options):
        is_rehearsal = triton.runtime._async_compile.active_mode.get() is not None
        compiled[fn.name] = compiled.get(fn.name, True) and is_rehearsal

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record)
    odd = {"d": 88, "f": 104, "vocab_size": 777}  # sizes that no other test compiles
    made = make("translation", dtype=torch.bfloat16, **odd)
    captured(graphs.GraphDecoder(made), read(3, 9), BEAM)
    assert compiled
    assert [name for name, is_rehearsal in compiled.items() if not is_rehearsal] == []


@pytest.mark.parametrize(
    ("rows", "kind", "d"),
    [(rows, kind, 72) for rows in (1, 2, 16, 20, b) for kind in KINDS]
    + [(rows, kind, 128) for rows in (33, 128, 200) for kind in ("multi-query", "multi-head")],
)
@torch.no_grad()
def test_bfloat16_logits_err_at_most_twice_as_much_as_the_plain_step(rows, kind, d):
    made, exact = (make("translation", kind, t, d=d) for t in (torch.bfloat16, torch.float64))
    exact.load_state_dict(made.state_dict())
    source, lengths = read(rows, 31)
    known = torch.tensor(lengths, device="cuda")
    low, high, own = (one.start(source, 9, source_lengths=known) for one in (made, exact, made))
    memories = [torch.stack([getattr(one, name) for one in own.memories]) for name in "KV"]
    decoder, cache = fused.FusedDecoder(made), own.cache
    results = []
    for _ in range(9):
        fed = tokens(rows, vocab_size=VOCABULARY).cuda()
        state = fused.Rows(fed, cache.lengths, cache.growing)
        logits = decoder.step(decoder.embed(state), state, cache, fused.Memories(*memories, known))
        cache.lengths.add_(1)
        results.append((logits.double(), made.step(fed, low).double(), exact.step(fed, high)))
    assert_at_most_twice(*(torch.stack(some) for some in zip(*results, strict=True)))


@both_tasks
@pytest.mark.parametrize("kind", ["multi-query", "multi-query local, gelu"])
def test_a_captured_plain_step_replays_the_logits_of_forward(kind, task):
    made, n = make(task, kind), 9
    source, fed = read(2, 11)[0], read(2, n, seed=1)[0]
    is_translation = isinstance(made, TranslationModel)
    prompt = source if is_translation else fed[:, :1]
    state = made.start(prompt, n, padded=True)
    buffer = torch.zeros(state.rows, dtype=torch.long, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            made.step(buffer, state)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = made.step(buffer, state)
    # capturing runs nothing, but the host counts it as a step
    state.cache.clear()

    replayed = []
    for column in fed.unbind(1):
        buffer.copy_(column)
        graph.replay()
        replayed.append(logits.clone())
    made, source, fed = made.cpu(), source.cpu(), fed.cpu()
    expected = made(source, fed) if is_translation else made(fed)
    assert_close_in(torch.float32, torch.stack(replayed, dim=1).cpu(), expected, ulps=1024)
    assert state.cache.lengths.tolist() == [n] * 2


@both_tasks
def test_an_engine_with_graphs_equals_one_without(task):
    made = engine(task, k=16, v=16).model.to("cuda", torch.float32)
    lines, options, answers = sentences(20), DecodeConfig(max_length=9, beam=2), []
    for captures in (True, False):
        one = Engine(made, tokenizer(), graphs=captures)
        answer = (one.translate if task == "translation" else one.generate)(lines, options)
        answers.append([each.text for each in answer])
    assert answers[0] == answers[1]


def test_unsupported_heads_are_decoded_step_by_step_with_a_warning(caplog):
    made = engine("translation").model.to("cuda", torch.float32)
    with caplog.at_level(logging.WARNING):
        one = Engine(made, tokenizer())
    assert "without CUDA graphs" in caplog.text
    assert "k to be a power of two" in caplog.text
    assert len(list(one.translate(sentences(3), DecodeConfig(max_length=4)))) == 3
