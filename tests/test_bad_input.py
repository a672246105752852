"""Every public entry answers bad input with an error of ours that says what to do."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import config, model, packing, random, tokens
from writehead import errors
from writehead.config import AttentionConfig, Batching
from writehead.engine import beam_search, greedy, sample
from writehead.errors import shown
from writehead.model import DecoderState, KVCache, Packing, TranslationModel, make_model
from writehead.ops.attention import attend
from writehead.ops.visibility import Visibility
from writehead.util.threads import use_threads

b, n, m, h, g, k, v, d = 2, 3, 5, 6, 2, 5, 7, 14
Case = tuple[Callable[[], object], str]
LANGUAGE, TRANSLATION = model(config()), model(config("translation"))


def integers(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


def attending(visibility: Visibility | None = None, **changes: object):
    """Attention over Q, K and V that fit, but for the changes."""
    fitting = {"Q": random(b, h, n, k), "K": random(b, g, m, k), "V": random(b, g, m, v)}
    return attend(**({**fitting, "scale": 1.0} | changes), visibility=visibility)


def cache(**changes: object) -> KVCache:
    sizes = {"layers": 3, "rows": b, "capacity": m} | changes
    return KVCache(AttentionConfig(d, h, g, k, v), **sizes)


def prompted(prompt: object = None, length: int = m, **options: object) -> DecoderState:
    return LANGUAGE.start(tokens(b, 1) if prompt is None else prompt, length, **options)


def sourced(length: int = n, **options: object) -> DecoderState:
    return TRANSLATION.start(tokens(b, m), length, **options)


def translating(source: Tensor | None = None, **options: object) -> Tensor:
    return TRANSLATION(tokens(b, m) if source is None else source, tokens(b, n), **options)


def full() -> DecoderState:
    started = prompted(length=1)
    started.cache.advance(1)
    return started


CONFIG: list[Case] = [
    (lambda: config(dropout=1.0), "must be below 1"),
    (lambda: config(eos=37), "eos=37 must be below 37"),
    (lambda: config(encoder_layers=2), "of a language model must be 0"),
    (lambda: attending(scale=0.0), r"usual value is k\*\*-0.5"),
    (lambda: attending(implementation="spda"), "did you mean 'sdpa'"),
    (lambda: TranslationModel(config()), "needs another class; use make_model"),
    (lambda: make_model("tiny/multi-query"), r"use preset\(\)"),
    (lambda: sourced(0), "23 positions"),
    (lambda: prompted(tokens(b, n), 2), "exceeds max_length=2; raise"),
    (lambda: sourced(beam=-1), "beam=-1 must be at least 1"),
    (lambda: Batching(tokens="4"), "tokens='4' must be an integer"),
    (lambda: use_threads(True), "must be an integer from 1 to 1024"),
    (lambda: use_threads(10**400), "must be an integer from 1 to 1024"),
]
CONFIG += [
    (lambda one=one: one(LANGUAGE.step, prompted(), {"beam": 1}, eos=1), "must be a DecodeConfig")
    for one in (greedy, beam_search, sample)
]

SHAPE: list[Case] = [
    (lambda: attending(Q=random(h, n, k)), r"attend takes Q \[b, h, n"),
    (lambda: attending(K=random(b, g, m, k + 1)), "Q and K the same b and k"),
    (lambda: attending(Q=random(b, 5, n, k)), "g must divide h"),
    (lambda: attending(Q=random(3, h, n, k)), "Q and K the same b and k"),
    (lambda: attending(Q=integers(b, h, n, k)), "one floating-point type"),
    (lambda: attending(V=random(b, g, m, v).to("meta")), "V is on meta and Q on cpu; move them"),
    (lambda: Visibility(query_segments=integers(b, n)), "both query_segments and memory_segments"),
    (lambda: attending(Visibility(lengths=torch.ones(b))), r"lengths is torch.float32 \[2\]"),
    (lambda: attending(Visibility(query_positions=integers(b, m))), r"integers \[2, 3\]"),
    (lambda: cache().reserve(n, integers(n)), r"integers \[2\]"),
    (lambda: cache().reserve(n, integers(b) * 4), "from 0 to 3"),
    (lambda: cache().reorder(integers(b) * 2), "from 0 to 1"),
    (lambda: LANGUAGE([[1, 2]]), "not list; use torch.tensor"),
    (lambda: LANGUAGE(torch.ones(b, n)), "must be integers .* not torch.float"),
    (lambda: LANGUAGE(integers(b, n).to("meta")), "on cpu, not .* on meta"),
    (lambda: LANGUAGE(tokens(b, 24)), "the model's 23 positions"),
    (lambda: LANGUAGE(tokens(b, n), packing=packing(integers(b, m))), r"must be integers \[2, 3\]"),
    (lambda: LANGUAGE(tokens(1, 1), packing=Packing(integers(1, 1), integers(1, 1) * 23)), "to 22"),
    (lambda: translating(tokens(3, m)), "source has 3 rows, but target has 2"),
    (lambda: translating(tokens(b, 20)), "19 positions"),
    (
        lambda: translating(source_packing=packing(integers(b, m))),
        "both source_packing and target_packing",
    ),
    (lambda: translating(source_lengths=integers(3)), r"source_lengths must be integers \[2\]"),
    (lambda: translating(source_lengths=integers(b) * 6), "from 0 to 5"),
    (lambda: prompted(prompt_lengths=integers(b) * 0), "prompt_lengths must be from 1 to 1"),
    (lambda: LANGUAGE.step(tokens(b, 1), prompted()), r"step takes a tensor \[rows\]"),
    (lambda: LANGUAGE.step(tokens(3), prompted()), "3 rows, but the state has 2"),
    (lambda: LANGUAGE.step(tokens(b), sourced()), "from another model; use one from"),
]

CACHE: list[Case] = [
    (lambda: cache(layers=0), "layers=0 must be at least 1"),
    (lambda: cache().reserve(0), "reserve at least 1"),
    (lambda: cache(beam=2).reserve(2), "by one position per step; pass n=1"),
    (lambda: cache(beam=2).reserve(1, integers(b)), "by one position per step; .* no counts"),
    (lambda: prompted(beam=-1), "beam=-1 must be at least 1"),
    (lambda: prompted(beam=2).expand(2), "already has 2 beams"),
    (lambda: sourced(beam=2).reorder(torch.tensor([0, 2, 2, 3])), "a beam of the same sentence"),
]

CASES = {
    errors.ConfigError: CONFIG,
    errors.ShapeError: SHAPE,
    errors.TokenError: [(lambda: LANGUAGE(integers(b, n) * 37), "must be from 0 to 36, not 37")],
    errors.CacheError: CACHE,
    errors.CacheFull: [(lambda: LANGUAGE.step(tokens(b), full()), "max_length=2 or more")],
    errors.BackendError: [(lambda: attending(implementation="sdpa"), "use 'auto'")],
}


@pytest.mark.parametrize(
    ("error", "call", "sentence"),
    [(error, *case) for error, cases in CASES.items() for case in cases],
)
def test_bad_input_is_answered_with_what_to_do(error, call, sentence):
    with pytest.raises(errors.WriteheadError) as caught:
        call()
    assert caught.type is error
    assert re.search(sentence, str(caught.value)), str(caught.value)


UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@settings(max_examples=20)
@given(st.one_of(st.text(), st.integers(), st.floats(), st.lists(st.text()), st.binary()))
def test_any_value_is_shown_on_one_short_line(value):
    text = shown(value)
    assert len(text) <= 62
    assert not UNSAFE.search(text)
    if isinstance(value, str) and len(repr(value)) <= 50:
        assert text == repr(value)
