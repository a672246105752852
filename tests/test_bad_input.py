"""Every public entry answers bad input with an error of ours that says what to do."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import config, model, random, tokens
from writehead.config import AttentionConfig, matched_d_ff
from writehead.decoding import Batching, beam_search, greedy, sample
from writehead.decoding.search import stream
from writehead.errors import (
    BackendError,
    CacheError,
    CacheFull,
    ConfigError,
    ShapeError,
    TokenError,
    WriteheadError,
)
from writehead.kernels import Visibility, attend
from writehead.model import (
    DecoderState,
    KVCache,
    LanguageModel,
    Packing,
    TranslationModel,
    make_model,
)

b, n, m, h, g, k, v, d = 2, 3, 5, 6, 2, 5, 7, 14
ones = torch.ones
Case = tuple[Callable[[], object], str]


def integers(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(*shape, dtype=torch.long, device=device)


def elsewhere(*shape: int) -> Tensor:
    return integers(*shape, device="meta")


def attending(visibility: Visibility | None = None, backend: str = "auto", **changes: object):
    """Attention over Q, K and V that fit, but for the changes."""
    fitting = {"Q": random(b, h, n, k), "K": random(b, g, m, k), "V": random(b, g, m, v)}
    return attend(**({**fitting, "scale": 1.0} | changes), visibility=visibility, backend=backend)


def seeing(**limits: Tensor) -> Tensor:
    return attending(Visibility(**limits))


def shared_rows(**limits: object) -> Tensor:
    """Three rows of Q to each row of K."""
    return attending(Visibility(**limits), Q=random(3 * b, h, n, k))


def attention_config(**changes: object) -> AttentionConfig:
    return AttentionConfig(**({"d": d, "h": h, "g": g, "k": k, "v": v} | changes))


def cache(window: int | None = None, **changes: object) -> KVCache:
    sizes = {"layers": 3, "rows": b, "capacity": m} | changes
    return KVCache(attention_config(window=window), **sizes)


def language() -> LanguageModel:
    return model(config())


def translation() -> TranslationModel:
    return model(config("translation"))


def state(**options: object) -> DecoderState:
    return language().start(tokens(b, 1), m, **options)


def translating(source: object = None, target: object = None, **options: object) -> Tensor:
    source = tokens(b, m) if source is None else source
    return translation()(source, tokens(b, n) if target is None else target, **options)


def sourced(source: object = None, length: object = n, **options: object) -> DecoderState:
    return translation().start(tokens(b, m) if source is None else source, length, **options)


def prompted(prompt: object = None, length: object = m, **options: object) -> DecoderState:
    return language().start(tokens(b, n) if prompt is None else prompt, length, **options)


def packing(*shape: int) -> Packing:
    return Packing.from_segments(integers(*shape))


def packed(segments: Tensor, positions: Tensor) -> Tensor:
    return language()(tokens(b, n), packing=Packing(segments, positions))


def stepping(fed: object, given: DecoderState | None = None) -> Tensor:
    return language().step(fed, given or state())


def full() -> DecoderState:
    started = language().start(tokens(b, 1), 1)
    started.cache.advance(started.cache.reserve(1))
    return started


CONFIG: list[Case] = [
    (lambda: attention_config(k=-7), "k=-7 must be at least 1"),
    (lambda: config(g=4), "must divide h=6"),
    (lambda: config(f=17.0), r"f=17\.0 is not an integer"),
    (lambda: config(dropout=1.0), "must be below 1"),
    (lambda: config(eos=37), "eos=37 must be below 37"),
    (lambda: config(activation="tanh"), "'relu' or 'gelu'"),
    (lambda: config(encoder_layers=2), "no encoder; leave encoder_layers"),
    (lambda: matched_d_ff(config(d=15), config()), "matched only if d is equal"),
    (lambda: attending(scale=0.0), r"usual one is k\*\*-0.5"),
    (lambda: attending(backend="spda"), "did you mean 'sdpa'"),
    (lambda: TranslationModel(config()), "make_model chooses the class"),
    (lambda: make_model("tiny/multi-query"), r"preset\(name\) returns one"),
    (lambda: sourced(length=0), "23 positions"),
    (lambda: prompted(length=2), "exceeds max_length=2; raise"),
    (lambda: sourced(beam=-1), "beam=-1 must be at least 1"),
    (lambda: Batching(tokens="4"), "tokens='4' is not an integer"),
    *(
        (
            lambda search=search: search(language().step, state(), {"beam": 1}, eos=1),
            r"options must be a DecodeConfig, not \{'beam': 1\} of type dict; pass one, such as",
        )
        for search in (greedy, beam_search, sample, stream)
    ),
]

SHAPE: list[Case] = [
    (lambda: attending(Q=random(h, n, k)), r"attend takes Q \[b, h, n"),
    (lambda: attending(K=random(b, g, m, k + 1)), "Q and K in k"),
    (lambda: attending(Q=random(b, 5, n, k)), "g must divide h"),
    (lambda: attending(Q=random(3, h, n, k)), "must divide the second"),
    (lambda: attending(Q=integers(b, h, n, k)), "one floating-point type"),
    (lambda: attending(V=random(b, g, m, v).to("meta")), "V is on meta and Q on cpu; move them"),
    (lambda: Visibility(query_segments=integers(b, n)), "both query_segments and memory_segments"),
    (lambda: seeing(lengths=ones(b)), r"lengths is torch.float32 \[2\]; .* need integers"),
    (lambda: seeing(query_positions=integers(b, m)), r"query_positions .* integers \[2, 3\]"),
    (lambda: seeing(ancestors=integers(b, m) * b), "rows of K and V, from 0 to 1"),
    (lambda: shared_rows(causal=True), "a row of K and V for each"),
    (lambda: cache().reserve(n, integers(n)), r"integers \[2\]"),
    (lambda: cache().reserve(n, integers(b) * 4), "from 0 to 3"),
    (lambda: cache().reorder(integers(b) * 2), "from 0 to 1"),
    (lambda: language().extend(tokens(b, n), state(), integers(b) * 4), "counts must be from 0"),
    (lambda: cache().reorder(integers(3)), r"integers \[2\]"),
    (lambda: language()([[1, 2]]), "not list; use torch.tensor"),
    (lambda: language()(ones(b, n)), "must be integers .* not torch.float"),
    (lambda: language()(elsewhere(b, n)), "on cpu, not .* on meta"),
    (lambda: language()(tokens(b, 24)), "the model's 23 positions"),
    (lambda: language()(tokens(b, n), packing=packing(b, m)), r"must be integers \[2, 3\]"),
    (lambda: packed(integers(b, n), integers(b, n) * 23), "from 0 to 22"),
    (lambda: packing(n), r"segments must be \[b, n\]"),
    (lambda: translating(tokens(3, m)), "3 rows of source for 2"),
    (lambda: translating(tokens(b, 20)), "19 positions"),
    (lambda: translating(source_packing=packing(b, m)), "both the source and the target"),
    (
        lambda: translation().encode(
            tokens(b, m), source_lengths=integers(b), packing=packing(b, m)
        ),
        "omit source_lengths",
    ),
    (lambda: translating(source_lengths=integers(3)), r"source_lengths must be integers \[2\]"),
    (lambda: translating(source_lengths=integers(b) * 6), "from 0 to 5"),
    (lambda: prompted(prompt_lengths=torch.tensor([n, 0])), "prompt_lengths must be from 1 to 3"),
    (lambda: stepping(tokens(b, 1)), r"step takes a tensor \[rows\]"),
    (lambda: stepping(tokens(3)), "3 rows of tokens for a state of 2"),
    (
        lambda: stepping(tokens(b), model(config(window=2)).start(tokens(b, 1), m)),
        "from another model; use one that start returned",
    ),
    (lambda: model(config(), dtype=torch.float32).step(tokens(b), state()), "another model"),
]

TOKEN: list[Case] = [
    (lambda: language()(integers(b, n) * 37), "tokens must be from 0 to 36, not 37"),
    (lambda: translating(target=integers(b, n) * 40), "target"),
    (lambda: stepping(integers(b) * 37), "not 37"),
]

CACHE: list[Case] = [
    (lambda: cache(layers=0), "layers=0 must be at least 1"),
    (lambda: cache().reserve(0), "reserve at least 1"),
    (lambda: cache().expand(0), "beam=0 must be at least 1"),
    (lambda: state(beam=-1), "beam=-1 must be at least 1"),
    (lambda: state(beam=2).expand(2), "already has 2 beams"),
    (lambda: sourced(beam=2).reorder(torch.tensor([0, 2, 2, 3])), "a beam of its own sentence"),
]

CASES = {
    ConfigError: CONFIG,
    ShapeError: SHAPE,
    TokenError: TOKEN,
    CacheError: CACHE,
    CacheFull: [(lambda: stepping(tokens(b), full()), "capacity 1; .* max_length=2 or more")],
    BackendError: [(lambda: attending(backend="sdpa"), "use backend='auto'")],
}


@pytest.mark.parametrize(
    ("error", "call", "sentence"),
    [(error, *case) for error, cases in CASES.items() for case in cases],
)
def test_bad_input_is_answered_with_what_to_do(error, call, sentence):
    with pytest.raises(WriteheadError) as caught:
        call()
    assert caught.type is error
    assert re.search(sentence, str(caught.value)), str(caught.value)
