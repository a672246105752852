"""Captured decoding on a CUDA device: the plain path's tokens, steady memory, small errors."""

import functools
import gc
import logging
import random as plain_random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import config, model, tokens
from texts import engine, sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.decoding import Engine, Hypothesis, beam_search
from writehead.model import LanguageModel, TranslationModel

choose = pytest.importorskip("writehead.kernels.choose", reason="Triton is not installed")
decode = pytest.importorskip("writehead.kernels.decode", reason="Triton is not installed")
graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
captures = pytest.importorskip("writehead.decoding.captured", reason="Triton is not installed")
fused = pytest.importorskip("writehead.model.fused", reason="Triton is not installed")
linear = pytest.importorskip("writehead.kernels.linear", reason="Triton is not installed")
tiles = pytest.importorskip("writehead.kernels.tiles", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

b, END, VOCABULARY = 37, 1, 501
SIZES = {
    "vocabulary": VOCABULARY,
    "d": 72,
    "f": 96,
    "h": 8,
    "k": 16,
    "v": 32,
    "decoder_layers": 2,
    "target_positions": 64,
}
KINDS = {
    "multi-query": {},
    "multi-head": {"g": 8},
    "grouped-query, layer norm, biases": {"g": 2, "norm": "layer", "bias": True},
    "multi-query local, gelu": {"window": 5, "activation": "gelu"},
}
GREEDY = DecodeConfig(max_length=24, min_length=4)
BEAM = DecodeConfig(max_length=20, min_length=4, beam=4, n_best=3)
Model = TranslationModel | LanguageModel

every_kind = pytest.mark.parametrize("kind", KINDS)
every_task = pytest.mark.parametrize("task", ["translation", "language"])
both_searches = pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])


@pytest.fixture(autouse=True)
def _exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_a_first_search_compiles_all_its_kernels_in_rehearsals(monkeypatch):
    triton = pytest.importorskip("triton")
    compiled: dict[str, bool] = {}  # by kernel: whether each time was in a rehearsal

    def note(*args, fn, **named):
        is_rehearsal = triton.runtime._async_compile.active_mode.get() is not None
        compiled[fn.name] = compiled.get(fn.name, True) and is_rehearsal

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    odd = {**SIZES, "d": 88, "f": 104, "vocabulary": 777}  # nothing else has compiled these
    made = model(config("translation", **odd), dtype=torch.bfloat16).to("cuda")
    captured(graphs.GraphDecoder(made), read(3, 9), BEAM)
    assert len(compiled) > 5
    assert [name for name, is_rehearsal in compiled.items() if not is_rehearsal] == []


@pytest.fixture
def moves(monkeypatch) -> list[int]:
    """How many sentences were moved to a smaller graph, each time that some were."""
    seen = []
    move = graphs.Buffers.move

    def noted(self, chosen, to):
        seen.append(len(chosen))
        move(self, chosen, to)

    monkeypatch.setattr(graphs.Buffers, "move", noted)
    return seen


def make(
    task: str, kind: str = "multi-query", dtype: torch.dtype = torch.float32, **changes: object
) -> Model:
    """A model of random weights that ends some of its texts."""
    sizes = SIZES | KINDS[kind] | changes
    if task == "translation":
        sizes |= {"encoder_layers": 2, "source_positions": 40}
    made = model(config(task, **sizes), dtype=torch.float32)
    with torch.no_grad():
        made.tokens.weight[END] *= 2.0
    return made.to("cuda", dtype)


def read(count: int, longest: int, seed: int = 0) -> tuple[Tensor, list[int]]:
    """Sources or prompts of different lengths, padded."""
    draw = plain_random.Random(seed)
    lengths = [longest, *(draw.randint(1, longest) for _ in range(count - 1))]
    rows = [[draw.randrange(2, VOCABULARY) for _ in range(longest)] for _ in lengths]
    return torch.tensor(rows, device="cuda"), lengths


def room(made: Model, batch: tuple[Tensor, list[int]], options: DecodeConfig) -> int:
    if isinstance(made, TranslationModel):
        return options.max_length
    return max(batch[1]) + options.max_length - 1


def plain(made: Model, batch, options: DecodeConfig, **limits) -> list[list[Hypothesis]]:
    name = "source_lengths" if isinstance(made, TranslationModel) else "prompt_lengths"
    lengths = {name: torch.tensor(batch[1], device="cuda")}
    state = made.start(batch[0], room(made, batch, options), beam=options.beam, **lengths)
    return beam_search(made.step, state, options, end=END, **limits)


def captured(decoder, batch, options: DecodeConfig, **limits) -> list[list[Hypothesis]]:
    capacity = room(decoder.model, batch, options)
    return list(decoder.search(*batch, capacity, options, end=END, **limits))


def assert_same(found: list[list[Hypothesis]], right: list[list[Hypothesis]]) -> None:
    def facts(some):
        return [[(one.tokens, one.finished) for one in hypotheses] for hypotheses in some]

    assert facts(found) == facts(right)
    ours, theirs = ([one.score for row in some for one in row] for some in (found, right))
    assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-4)


def limits_of(options: DecodeConfig, count: int = b) -> dict[str, list]:
    """Lengths and prefixes of each sentence its own."""
    lengths = [3 + i % (options.max_length - 2) for i in range(count)]
    return {"max_lengths": lengths, "prefixes": [[7, 9, 11][: i % 4] for i in range(count)]}


@both_searches
@every_kind
def test_captured_translation_finds_the_plain_paths_tokens(kind, options):
    made, batch = make("translation", kind), read(b, 31)
    right = plain(made, batch, options)
    assert len({len(one.tokens) for [one, *_] in right}) > 1
    assert_same(captured(graphs.GraphDecoder(made), batch, options), right)


@both_searches
@pytest.mark.parametrize("kind", ["multi-query", "multi-query local, gelu"])
def test_captured_generation_finds_the_plain_paths_tokens(kind, options):
    made, batch = make("language", kind), read(b, 9)
    right = plain(made, batch, options)
    assert_same(captured(graphs.GraphDecoder(made), batch, options), right)


@both_searches
@every_task
def test_prefixes_and_lengths_are_kept_to(task, options):
    made, batch = make(task), read(b, 9)
    options = replace(options, min_length=3, alpha=0.2)
    limits = limits_of(options)
    right = plain(made, batch, options, **limits)
    assert_same(captured(graphs.GraphDecoder(made), batch, options, **limits), right)


@pytest.mark.parametrize("count", [1, 2, 16, 20])
@both_searches
def test_batches_of_every_size_are_decoded_by_one_decoder(options, count):
    made = make("translation")
    decoder = graphs.GraphDecoder(made)
    for seed in range(2):
        batch = read(count, 12, seed)
        assert_same(captured(decoder, batch, options), plain(made, batch, options))


@both_searches
@every_task
def test_sentences_that_grow_move_to_smaller_graphs(task, options, moves):
    made, batch = make(task), read(b, 9)
    options = replace(options, max_length=44)
    limits = {"max_lengths": [4 + i % 40 for i in range(b)]}
    right = plain(made, batch, options, **limits)
    decoder = graphs.GraphDecoder(made)
    assert_same(captured(decoder, batch, options, **limits), right)
    assert moves
    assert_same(captured(decoder, batch, options, **limits), right)


@both_searches
def test_the_same_batch_gives_the_same_to_the_bit(options):
    made, batch = make("translation", dtype=torch.bfloat16), read(b, 31)
    decoder = graphs.GraphDecoder(made)
    first = captured(decoder, batch, options)
    captured(decoder, read(b, 20, seed=1), options)
    assert captured(decoder, batch, options) == first


def rescored(made: TranslationModel, batch, found: list[list[Hypothesis]]) -> Tensor:
    """The log-probabilities of all hypotheses by whole forward passes."""
    totals = []
    for row, length, hypotheses in zip(*batch, found, strict=True):
        for one in hypotheses:
            said = [*one.tokens, *[END] * one.finished]
            fed = torch.tensor([[0, *said[:-1]]], device="cuda")
            with torch.no_grad():
                logits = made(row[:length].unsqueeze(0), fed)[0]
            log_p = torch.log_softmax(logits.double(), dim=1)
            totals.append(log_p[range(len(said)), said].sum())
    return torch.stack(totals)


def assert_at_most_twice(error: Tensor, allowed: Tensor) -> None:
    # where plain PyTorch happens to be exact, some units in float32's last place are allowed
    assert error.max() <= 2 * allowed.max() + 2e-6
    assert error.mean() <= 2 * allowed.mean() + 2e-7


@both_searches
@every_kind
def test_scores_in_bfloat16_err_at_most_twice_as_much_as_those_of_forward(kind, options):
    assert_scores_err_at_most_twice_as_much(kind, options)


@pytest.mark.parametrize("options", [GREEDY, replace(BEAM, beam=3)], ids=["37 rows", "111 rows"])
def test_scores_by_products_of_tiles_err_at_most_twice_as_much_too(options):
    assert_scores_err_at_most_twice_as_much("multi-query", options, d=128)


def assert_scores_err_at_most_twice_as_much(
    kind: str, options: DecodeConfig, **changes: object
) -> None:
    """Holds a search's scores in bfloat16 against `forward`'s, by how far both miss float64's."""
    made, batch = make("translation", kind, torch.bfloat16, **changes), read(b, 31)
    exact = make("translation", kind, torch.float64, **changes)
    exact.load_state_dict(made.state_dict())
    found = captured(graphs.GraphDecoder(made), batch, options)
    ours = [one.log_probability for hypotheses in found for one in hypotheses]
    right = rescored(exact, batch, found)
    error = (torch.tensor(ours, device="cuda") - right).abs()
    assert_at_most_twice(error, (rescored(made, batch, found) - right).abs())


@every_kind
@pytest.mark.parametrize("rows", [1, 2, 16, 20, b])
def test_logits_in_bfloat16_err_at_most_twice_as_much_as_those_of_the_plain_step(rows, kind):
    assert_logits_err_at_most_twice_as_much(rows, kind)


@pytest.mark.parametrize("rows", [33, 128, 200])
@pytest.mark.parametrize("kind", ["multi-query", "multi-head"])
def test_logits_whose_products_are_by_tiles_err_at_most_twice_as_much_too(rows, kind):
    assert_logits_err_at_most_twice_as_much(rows, kind, d=128)


@torch.no_grad()
def assert_logits_err_at_most_twice_as_much(rows: int, kind: str, **changes: object) -> None:
    """Holds steps in bfloat16 against the plain step's, by how far both are from float64's."""
    made, exact = (
        make("translation", kind, dtype, **changes) for dtype in (torch.bfloat16, torch.float64)
    )
    exact.load_state_dict(made.state_dict())
    source, lengths = read(rows, 31)
    known = torch.tensor(lengths, device="cuda")
    low, right, own = (one.start(source, 9, source_lengths=known) for one in (made, exact, made))
    memories = [torch.stack([getattr(one, name) for one in own.memories]) for name in "KV"]
    decoder, cache = fused.FusedDecoder(made), own.cache
    errors, allowed = [], []
    for _ in range(9):
        fed = tokens(rows, vocabulary=VOCABULARY).cuda()
        said = fused.Rows(fed, cache.lengths, cache.growing)
        X = decoder.embed(said)
        logits = decoder.step(X, said, cache, fused.Memories(*memories, known))
        cache.lengths.add_(1)
        true = exact.step(fed, right)
        errors.append((logits - true).abs())
        allowed.append((made.step(fed, low) - true).abs())
    assert_at_most_twice(torch.stack(errors), torch.stack(allowed))


def test_programs_that_meet_choose_each_rows_token_once():
    rows, size, steps = 1024, 32768, 60
    found = choose.Candidates.make(rows, size, 1, torch.device("cuda"))
    integers = functools.partial(torch.zeros, dtype=torch.int32, device="cuda")
    most = torch.full((rows,), steps + 1, dtype=torch.int32, device="cuda")
    limits = choose.Limits(integers(1), integers(rows, 1), integers(rows), most, integers(1))
    tokens, lengths = (torch.zeros(rows, dtype=torch.long, device="cuda") for _ in range(2))
    state = choose.Rows(tokens, lengths, torch.ones_like(tokens))
    texts, log_p = integers(rows, steps), torch.zeros(rows, device="cuda")
    E, P = (torch.randn(count, 64, device="cuda", dtype=torch.bfloat16) for count in (size, steps))
    feed = choose.Feed(E, P, torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16))
    right = torch.zeros(rows, device="cuda", dtype=torch.float64)
    for t in range(steps):
        logits = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
        logits[:, 1] = -9.0  # the end
        choose.choose_greedy(
            logits, found, limits, state, texts, log_p, feed, vocabulary=size, end=1
        )
        best = logits.max(1, keepdim=True)
        first = (logits == best.values).int().argmax(1)  # of equals the lowest
        right += logits.double().log_softmax(1).gather(1, first.unsqueeze(1)).squeeze(1)
        assert torch.equal(texts[:, t].long(), first)
        assert torch.equal(tokens, first)
        assert limits.clock.item() == t + 1
        assert not found.done.any()
        position = min(t + 1, steps - 1)
        assert torch.equal(feed.X, (E[first].float() + P[position].float()).bfloat16())
    torch.testing.assert_close(log_p.double(), right, atol=1e-3, rtol=1e-5)


def mixed_batches(count: int) -> list[tuple]:
    """Batches of many shapes, with what is asked of each; those of one seed are the same again."""
    draw = plain_random.Random(5)
    made = []
    for seed in range(count):
        rows, longest = draw.choice([1, 3, 17, b, 64]), draw.choice([2, 19, 40])
        search, longest_found = draw.choice([GREEDY, BEAM]), draw.choice([5, 20, 60])
        options = replace(search, min_length=1, max_length=longest_found)
        limits = limits_of(options, rows) if seed % 2 else {}
        made.append((read(rows, longest, seed), options, limits))
    return made


def test_two_hundred_mixed_batches_leave_the_memory_as_it_was():
    decoder = graphs.GraphDecoder(make("translation", dtype=torch.bfloat16))
    batches = mixed_batches(25)

    def held() -> int:
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    for _ in range(2):  # the second time an encoder of few tokens is captured
        first = [captured(decoder, batch, options, **limits) for batch, options, limits in batches]
    before = held()
    draw = plain_random.Random(6)
    for _ in range(200):
        i = draw.randrange(len(batches))
        batch, options, limits = batches[i]
        found = captured(decoder, batch, options, **limits)
        assert found == first[i]
    assert held() == before


def test_an_encoder_of_few_tokens_is_captured_the_second_time(monkeypatch):
    made = make("translation", dtype=torch.bfloat16, v=SIZES["k"])  # which SDPA takes
    batches = [read(b, longest, seed) for seed, longest in enumerate((9, 12, 7))]
    right = [captured(graphs.GraphDecoder(made), batch, GREEDY) for batch in batches]
    decoder = graphs.GraphDecoder(made)
    found = [captured(decoder, batch, GREEDY) for batch in batches[:2]]
    monkeypatch.setattr(fused.FusedDecoder, "encode", lambda *_: pytest.fail("it is not captured"))
    found.append(captured(decoder, batches[2], GREEDY))
    assert found == right


def test_an_encoder_of_more_tokens_is_not_captured(monkeypatch):
    monkeypatch.setattr(captures, "FEW_TOKENS", 40 * 40 - 1)  # less than sources padded have
    made, encoded = make("translation", dtype=torch.bfloat16), []
    encode = fused.FusedDecoder.encode
    monkeypatch.setattr(
        fused.FusedDecoder, "encode", lambda *given: encoded.append(given[1]) or encode(*given)
    )
    decoder, batch = graphs.GraphDecoder(made), read(b, 9)
    for _ in range(3):
        captured(decoder, batch, GREEDY)
    assert len(encoded) >= 3
    assert all(source is batch[0] for source in encoded)  # as they are, not padded


def test_graphs_that_were_not_used_for_long_give_their_memory_back():
    decoder = graphs.GraphDecoder(make("translation", dtype=torch.bfloat16))
    decoder._budget = 1
    captured(decoder, read(64, 9), GREEDY)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for count in (1, b, 3, 64):
        captured(decoder, read(count, 9), GREEDY)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def products(Q: Tensor, K: Tensor, V: Tensor, visible: Tensor, scale: float) -> Tensor:
    """O [rows, h v] of Q [rows, h k] over K and V [rows, g, m, …], as anyone would write it."""
    rows, g, _, k = K.shape
    logits = Q.view(rows, g, -1, k) @ K.mT * scale
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    return (torch.softmax(logits, dim=3) @ V).reshape(rows, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("rows", "beams", "g", "m", "k", "v"),
    [
        (300, 1, 8, 100, 128, 128),
        (300, 1, 1, 128, 128, 128),
        (37, 4, 1, 128, 64, 128),
        (5, 4, 2, 1000, 128, 32),
        (1, 1, 1, 9000, 128, 128),
        (1, 1, 8, 3000, 16, 256),
    ],
)
def test_reading_a_memory_errs_at_most_twice_as_much_as_plain_pytorch(
    rows, beams, g, m, k, v, padded, dtype
):
    h, scale = 8, k**-0.5
    Q, K, V = (
        random(*shape, dtype=dtype)
        for shape in ((rows * beams, h * k), (rows, g, m, k), (rows, g, m, v))
    )
    lengths = torch.randint(1, m + 1, (rows,), device="cuda")
    growing = torch.ones(rows * beams, dtype=torch.long, device="cuda")

    O = decode.attend_memory(  # noqa: E741
        Q, K, V, lengths, growing, heads=h, scale=scale, padded=padded
    )

    visible = torch.arange(m, device="cuda") < lengths.unsqueeze(1)
    many = [T.repeat_interleave(beams, dim=0) for T in (K, V, visible)]
    exact = products(Q.double(), *(T.double() for T in many[:2]), many[2], scale)
    assert O.dtype == dtype
    assert_at_most_twice((O - exact).abs(), (products(Q, *many, scale) - exact).abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("rows", "g", "size", "k", "v"),
    [(300, 8, 100, 128, 128), (300, 1, 128, 128, 64), (1, 1, 5000, 128, 128), (1, 8, 900, 32, 64)],
)
def test_appending_errs_at_most_twice_as_much_as_plain_pytorch(rows, g, size, k, v, ring, dtype):
    h, scale = 8, k**-0.5
    QKV = random(rows, h * k + g * (k + v), dtype=dtype)
    K, V = random(rows, g, size, k, dtype=dtype), random(rows, g, size, v, dtype=dtype)
    lengths = torch.randint(size, (rows,), device="cuda") + (3 * size if ring else 0)
    growing = torch.ones(rows, dtype=torch.long, device="cuda")
    q, new_k, new_v = torch.split(QKV, [h * k, g * k, g * v], dim=1)
    right_k, right_v = K.clone(), V.clone()
    own, slots = torch.arange(rows, device="cuda"), lengths % size
    right_k[own, :, slots] = new_k.view(rows, g, k)
    right_v[own, :, slots] = new_v.view(rows, g, v)

    O = decode.append_and_attend(  # noqa: E741
        QKV, K, V, lengths, growing, None, heads=h, scale=scale
    )

    assert torch.equal(K, right_k)
    assert torch.equal(V, right_v)
    visible = torch.arange(size, device="cuda") <= lengths.unsqueeze(1)
    exact = products(q.double(), K.double(), V.double(), visible, scale)
    assert_at_most_twice((O - exact).abs(), (products(q, K, V, visible, scale) - exact).abs())


@pytest.mark.parametrize(("columns", "depth"), [(1024, 1024), (4096, 1000), (1000, 4100)])
def test_the_product_of_one_row_errs_at_most_twice_as_much_as_plain_pytorch(columns, depth):
    X, W = random(1, depth, dtype=torch.bfloat16), random(columns, depth, dtype=torch.bfloat16)
    norm = torch.nn.RMSNorm(depth, eps=1e-6, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.normal_()
    plain_product = norm(X) @ W.T
    exact = torch.nn.functional.rms_norm(X.double(), (depth,), norm.weight.double(), 1e-6)
    exact = exact @ W.double().T
    found = linear.row_linear(X, W, norm=linear.Norm(norm.weight.detach(), 1e-6))
    assert_at_most_twice((found - exact).abs(), (plain_product - exact).abs())


@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(2, 1024, 1024), (16, 1000, 5440), (16, 1280, 900), (32, 70, 512)],
)
def test_products_of_few_rows_err_at_most_twice_as_much_as_plain_pytorch(rows, columns, depth):
    X, R, S, W = (
        random(*shape, dtype=torch.bfloat16)
        for shape in ((rows, depth), (rows, columns), (rows, 500), (columns, depth))
    )
    assert linear.few_rows(X, W)
    root = (S.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    exact = X.double() @ W.double().T * root + R
    plain_product = (X @ W.T * root.bfloat16() + R) - exact
    found = linear.rows_linear(X, W, residual=R, unnormed=linear.Unnormed(S, 1e-6))
    assert_at_most_twice((found - exact).abs(), plain_product.abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(33, 1280, 1024), (40, 1000, 512), (128, 1024, 1024), (256, 70, 960)],
)
def test_products_by_tiles_err_at_most_twice_as_much_as_plain_pytorch(rows, columns, depth, dtype):
    X, R, W = (
        random(*shape, dtype=dtype) for shape in ((rows, depth), (rows, columns), (columns, depth))
    )
    shape = tiles.choose_shape(X, W)
    assert shape is not None
    exact = X.double() @ W.double().T + R
    plain_product = (X @ W.T + R) - exact
    found = tiles.tiled_linear(X, W, shape, residual=R)
    assert_at_most_twice((found - exact).abs(), plain_product.abs())
    apart = tiles.tiled_linear(X, W, shape, residual=R[:, :50], beside=R[:, 50:])
    assert_at_most_twice((apart - exact).abs(), plain_product.abs())


@every_task
def test_an_engine_with_captured_graphs_answers_as_one_without(task):
    made = engine(task, k=16, v=16).model.to("cuda", torch.float32)
    lines, options = sentences(20), DecodeConfig(max_length=9, beam=2)
    answers = []
    for captures in (True, False):
        one = Engine(made, tokenizer(), graphs=captures)
        answers.append(
            list((one.translate if task == "translation" else one.generate)(lines, options))
        )
    assert [one.text for one in answers[0]] == [one.text for one in answers[1]]


def test_heads_that_the_kernels_cannot_take_are_decoded_step_by_step_and_that_is_said(caplog):
    made = engine("translation").model.to("cuda", torch.float32)
    with caplog.at_level(logging.WARNING):
        one = Engine(made, tokenizer())
    assert "step by step" in caplog.text
    assert "k to be a power of two" in caplog.text
    assert len(list(one.translate(sentences(3), DecodeConfig(max_length=4)))) == 3
