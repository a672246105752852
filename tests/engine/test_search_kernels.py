"""The search kernels against the reference: any slots, in any order, each with its own options."""

from collections.abc import Iterator, Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor

from helpers import DEVICE, assert_close_in, randn
from search_toys import assert_same
from writehead.config import AttentionConfig, DecodeConfig
from writehead.engine import search_kernels
from writehead.engine.search import Hypothesis, Options, Search, Targets, make_hypotheses
from writehead.errors import BackendError, ConfigError, TokenError
from writehead.model import KVCache

# the kernels compute with minus infinity
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("interpreted"),
]

NEVER, EOS, V = float("-inf"), 1, 29
LARGE = search_kernels.PART + 100  # two parts; the second part and its last chunk are incomplete


@pytest.fixture
def small_parts(monkeypatch):
    """Splits even a small vocabulary into several chunks, tiles and parts."""
    monkeypatch.setattr(search_kernels, "CHUNK", 4)
    monkeypatch.setattr(search_kernels, "PART", 16)
    monkeypatch.setattr(search_kernels, "TILE", 16)


def make_pair(slots: int, beam: int, vocab_size: int = V, **changes: object) -> list[Search]:
    """The reference and the kernels, with a KV cache that is a ring of 5 positions."""
    rows, made = slots * beam, []
    for name in ("reference", "triton"):
        heads = AttentionConfig(d=2, h=1, g=1, k=1, v=1)
        cache = KVCache(heads, layers=1, rows=rows, capacity=5, beam=beam, device=DEVICE)
        cache.live.zero_()
        for T in (cache.lengths, cache.ancestors):
            if T is not None:
                T.fill_(77)
        given = {"cache": cache, "device": DEVICE, "implementation": name, **changes}
        made.append(Search(slots, beam, 12, Targets(vocab_size, EOS), **given))
    return made


def assert_equal_state(plain: Search, kernels: Search, slots: Sequence[int]) -> None:
    """Asserts that everything the next step depends on is equal."""
    rows = [slot * plain.beam + j for slot in slots for j in range(plain.beam)]
    for name in ("live", "lengths", "tokens", "parents"):
        ours, theirs = getattr(kernels, name)[rows], getattr(plain, name)[rows]
        if name in ("tokens", "parents") and plain.beam > 1:  # unused without a hypothesis
            exists = plain.scores.flatten()[rows] != NEVER
            ours, theirs = ours[exists], theirs[exists]
        assert ours.tolist() == theirs.tolist(), name
    assert kernels.options.count.tolist() == plain.options.count.tolist()
    exists = plain.live.view(-1, plain.beam)[:, 0] != 0
    if plain.beam > 1:
        for slot in exists.nonzero().flatten().tolist():
            mine = slice(slot * plain.beam, (slot + 1) * plain.beam)
            filled = min(int(plain.lengths[mine][0]), 5)
            live = plain.scores[slot] != NEVER
            ours, theirs = (one.ancestors[mine][live, :filled] for one in (kernels, plain))
            assert ours.tolist() == theirs.tolist()
        assert_close_in(torch.float32, kernels.scores[exists], plain.scores[exists], ulps=64)


def collect(search: Search, admitted: dict[int, Options]) -> list[list[Hypothesis]]:
    options = [*admitted.values()]
    n_best = max(one.config.n_best for one in options)
    packed = search.collect(torch.tensor([*admitted], device=DEVICE), n_best)
    found = make_hypotheses(packed.cpu().numpy(), options)
    return [[one.with_tuple() for one in some] for some in found]


def run(
    pair: list[Search],
    admitted: dict[int, Options],
    logits: Iterator[Tensor],
    orders: Sequence[Sequence[int] | None],
    sampling: bool = False,
) -> None:
    """Advances both with the same logits, for the given slots in turn, until all have ended."""
    plain, kernels = pair
    slots = [*admitted]
    for one in pair:
        lengths = [slot % 4 for slot in slots]
        one.admit(slots, [*admitted.values()], [3 + slot for slot in slots], lengths)
    for t in range(60):
        order = orders[t % len(orders)]
        listed = None if order is None else torch.tensor(order, dtype=torch.int32, device=DEVICE)
        x = next(logits)[: (plain.slots if order is None else len(order)) * plain.beam]
        for one in pair:
            one.advance(x, listed, sampling)
        assert_equal_state(plain, kernels, slots)
        if t in (1, 3) or not plain.live.any():
            found = collect(kernels, admitted), collect(plain, admitted)
            for ours, theirs in zip(*found, strict=True):
                assert_same(ours, theirs, 1e-5)
        if not plain.live.any():
            return
    pytest.fail("the search does not end")


def random_logits(
    rows: int, vocab_size: int = V, *, dtype: torch.dtype = torch.float32, eos: float = 0.0
) -> Iterator[Tensor]:
    """Logits [rows, vocab_size + 3]; ids past the vocabulary are neither chosen nor counted."""
    while True:
        x = 2.0 * randn(rows, vocab_size + 3)
        x[:, EOS] += eos
        x[:, vocab_size:] = 40.0
        yield x.to(dtype)


def has_no_ties(logits: Tensor) -> bool:
    """Whether the logits of each row differ; beam search may choose any of equal ones."""
    return bool((logits[:, :V].sort(dim=1).values.diff(dim=1) > 0.0).all())


def request(i: int = 0, **changes: object) -> Options:
    """Options that differ between slots."""
    own = {"max_length": 5 + i % 4, "prefix": [(), (7, 4), (), (9,)][i % 4], "seed": i}
    own |= {name: changes.pop(name) for name in [*changes] if name in own}
    given = {"min_length": i % 3, "alpha": [0.6, 0.0, -1.5][i % 3], "beam": changes.get("n_best")}
    return Options(DecodeConfig(**given | changes), **own)


def plain(max_length: int, **changes: object) -> Options:
    return Options(DecodeConfig(beam=changes.get("n_best"), **changes), max_length)


# slots 3 and 5 are not live; one of them pads the lists
LISTS = [[4, 0, 2, 1, 3, 3], [2, 1, 0, 4], [1, 3, 0, 4, 3, 2]]


@pytest.mark.parametrize("beam", [1, 2, 3])
def test_kernels_equal_the_reference_and_slots_can_be_reused(beam, small_parts):
    pair = make_pair(6, beam)
    for seed, (orders, dtype) in enumerate((([None], torch.float32), (LISTS, torch.float16))):
        for one in pair:
            one.admit([3], [request(3)])
            one.release([3])
        options = {
            i: request(i + seed, n_best=1 + i % beam, max_length=3 + i % 3) for i in (0, 1, 2, 4)
        }
        logits = random_logits(6 * beam, dtype=dtype, eos=1.0)
        run(pair, options, filter(has_no_ties, logits), orders)


NARROW = [{}, {"top_k": 1}, {"top_k": 5}, {"top_k": 28}, {"top_k": 1000}, {"top_p": 0.3}]
NARROW += [{"top_p": 0.95}, {"top_p": 1e-6}, {"min_p": 0.2}, {"min_p": 1.0}]
NARROW += [{"top_k": 8, "top_p": 0.7}, {"top_k": 8, "min_p": 0.1}, {"top_p": 0.9, "min_p": 0.02}]
NARROW += [{"top_k": 20, "top_p": 0.9, "min_p": 0.01}]


@pytest.mark.parametrize(
    ("vocab_size", "tile", "dtype"),
    [(V, 16, torch.float32), (V, 32, torch.float16), (LARGE, None, torch.float32)],
)
def test_samples_equal_the_reference_for_every_filter(vocab_size, tile, dtype, monkeypatch):
    if vocab_size == V:
        for name, size in (("CHUNK", 4), ("PART", 16), ("TILE", tile)):
            monkeypatch.setattr(search_kernels, name, size)
    narrowed = NARROW if vocab_size == V else NARROW[2:14:4]
    slots = len(narrowed) + 2
    pair = make_pair(slots, 1, vocab_size)
    heats, penalties = [1.0, 0.5, 3.0, 1e-30, 1e30], [None, 1.0, 1.7, 0.6]
    options = [
        request(i, max_length=4, temperature=heat, repetition_penalty=penalty, **narrow)
        for i, (narrow, heat, penalty) in enumerate(zip(narrowed, cycle(heats), cycle(penalties)))
    ]
    options += [request(0, max_length=4), request(2, repetition_penalty=9.0, max_length=4)]
    x = random_logits(slots, vocab_size, dtype=dtype, eos=-2.0)
    # round, so that many tokens are equal
    rounded = x if dtype is torch.float32 else ((2.0 * row).round() / 2.0 for row in x)
    run(pair, dict(enumerate(options)), rounded, [None], sampling=True)


@pytest.mark.parametrize(("beam", "dtype"), [(1, torch.float16), (2, torch.float32)])
def test_vocabularies_larger_than_a_part(beam, dtype):
    pair = make_pair(3, beam, LARGE)
    options = {i: request(i, max_length=3) for i in range(3)}
    run(pair, options, random_logits(3 * beam, LARGE, dtype=dtype), [[2, 0, 1]])


def test_ties_go_to_the_earlier_beam_and_then_the_lower_token(small_parts):
    logits = torch.zeros(4, V)
    logits[1, [7, 5, 6]] = 1.0  # in one chunk and the next
    logits[2, [28, 18, 17]] = 1.0  # in another part and the last
    logits[3, [22, 3]] = 1.0  # in two parts
    _, search = make_pair(4, 1)
    search.admit(range(4), [plain(3)] * 4)
    search.advance(logits.to(DEVICE), sampling=False)
    assert search.tokens.tolist() == [0, 5, 17, 3]
    _, search = make_pair(1, 3)
    search.admit([0], [plain(4)])
    search.scores.copy_(torch.tensor([[-1.0, -1.0, -3.0]]))
    logits = torch.zeros(3, V)
    logits[0, [12, 20]] = logits[1, [4, 20]] = 1.0
    search.advance(logits.to(DEVICE))
    assert search.tokens.tolist() == [12, 20, 4]
    assert search.parents.tolist() == [0, 0, 1]


@pytest.mark.parametrize(("sampling", "temperature"), [(False, None), (True, None), (True, 1.0)])
def test_nan_and_infinite_logits_end_a_row_with_a_valid_token(sampling, temperature, small_parts):
    logits = torch.randn(5, V)
    logits[0] = logits[1, 20] = torch.nan
    logits[2] = NEVER
    logits[3, 7] = torch.inf
    for search in make_pair(5, 1):
        options = [plain(3, temperature=temperature)] * 5
        search.admit(range(5), options)
        search.advance(logits.to(DEVICE), sampling=sampling)
        assert all(0 <= token < V for token in search.tokens.tolist())
        assert search.live[:4].tolist() == [0] * 4
        found = collect(search, dict(enumerate(options)))
        assert [bool(best) for best in found] == [False] * 4 + [True]


@pytest.mark.parametrize("lost", [slice(2), slice(1, 2), (slice(1, 2), 7)], ids=str)
def test_a_slot_with_nan_logits_ends_without_results(lost, small_parts):
    first, second = torch.randn(2, 4, V)
    first[:, EOS] = 3.0  # a hypothesis has ended before the NaN
    second[lost] = torch.nan
    for search in make_pair(2, 2):
        options = [plain(6, n_best=2)] * 2
        search.admit(range(2), options)
        search.advance(first.to(DEVICE))
        assert search.live.tolist() == [1] * 4
        search.advance(second.to(DEVICE))
        assert search.live.tolist() == [0, 0, 1, 1]
        found = collect(search, dict(enumerate(options)))
        assert [bool(best) for best in found] == [False, True]


def test_invalid_requests_and_implementations_are_rejected(monkeypatch):
    _, search = make_pair(2, 2)
    for changes in ({"max_length": 13}, {"max_length": 0}, {"n_best": 3}, {"temperature": 1.0}):
        with pytest.raises(ConfigError):
            search.admit([0], [request(0, **changes)])
    with pytest.raises(TokenError, match="outside the vocabulary"):
        search.admit([0], [request(0, prefix=(V,))])
    with pytest.raises(ConfigError, match="unknown implementation of search"):
        make_pair(1, 1, implementation="cuda")
    with pytest.raises(BackendError, match="beams of up to 32, not 33"):
        make_pair(1, 33)
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(BackendError, match="GPU"):
            make_pair(1, 1)


@pytest.mark.gpu
def test_concurrent_programs_choose_the_token_of_each_row_once():
    pair = make_pair(1024, 1, 32768)
    for one in pair:
        one.admit(range(1024), [plain(12)] * 1024)
    for _ in range(8):
        logits = randn(1024, 32768, dtype=torch.bfloat16)
        logits[:, EOS] = -9.0
        for one in pair:
            one.advance(logits, sampling=False)
        assert torch.equal(pair[0].tokens, pair[1].tokens)
