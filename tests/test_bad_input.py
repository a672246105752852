"""Every public entry answers bad input with an error of ours that says what to do."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers import config, model, random, tokens
from writehead.config import AttentionConfig, DecodeConfig, matched_d_ff
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
    Attention,
    DecoderState,
    KVCache,
    LanguageModel,
    Packing,
    TranslationModel,
    make_model,
)
from writehead.model.attention import WholePast

b, n, m, h, g, k, v, d = 2, 3, 5, 6, 2, 5, 7, 14
Case = tuple[str, Callable[[], object], type[WriteheadError], str]


def integers(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


def tensors(**changes: Tensor) -> list[Tensor]:
    """Q, K and V that fit, but for the changes."""
    fitting = {"Q": random(b, h, n, k), "K": random(b, g, m, k), "V": random(b, g, m, v)}
    return list((fitting | changes).values())


def attending(visibility: Visibility | None = None, backend: str = "auto", **changes: Tensor):
    return attend(*tensors(**changes), visibility, scale=1.0, backend=backend)


def seeing(**limits: Tensor) -> Tensor:
    return attending(Visibility(**limits))


def shared_rows(**limits: object) -> Tensor:
    """Three rows of Q to each row of K."""
    return attending(Visibility(**limits), Q=random(3 * b, h, n, k))


def attention_config(**changes: object) -> AttentionConfig:
    return AttentionConfig(**({"d": d, "h": h, "g": g, "k": k, "v": v} | changes))


def cache(**changes: object) -> KVCache:
    return KVCache(
        attention_config(window=changes.pop("window", None)),
        **({"layers": 3, "rows": b, "capacity": m} | changes),
    )


def append(K: Tensor, V: Tensor) -> object:
    return cache().reserve(n).layer(0).append(K, V)


def rewound(r: int) -> None:
    written = cache()
    written.advance(written.reserve(2))
    written.rewind(r)


def language() -> LanguageModel:
    return model(config())


def translation() -> TranslationModel:
    return model(config("translation"))


def state(**options: object) -> DecoderState:
    return language().start(tokens(b, 1), m, **options)


def translating(source: Tensor, target: Tensor, **options: object) -> Tensor:
    return translation()(source, target, **options)


def packing(*shape: int) -> Packing:
    return Packing.from_segments(integers(*shape))


def stepping(fed: Tensor, given: DecoderState | None = None) -> Tensor:
    return language().step(fed, given or state())


def filled() -> Tensor:
    made = language()
    full = made.start(tokens(b, 1), 2)
    made.extend(tokens(b, 2), full)
    return made.step(tokens(b), full)


CONFIG: list[Case] = [
    ("negative_size", lambda: attention_config(k=-7), ConfigError, "k=-7 must be at least 1"),
    ("no_heads", lambda: attention_config(g=0), ConfigError, "g=0 must be at least 1"),
    ("g_not_dividing_h", lambda: config(g=4), ConfigError, "choose g from 1, 2, 3, 6"),
    ("more_write_heads", lambda: config(g=12), ConfigError, "choose g from 1, 2, 3, 6"),
    ("zero_window", lambda: config(window=0), ConfigError, "window=0 must be at least 1"),
    ("no_layers", lambda: config(decoder_layers=0), ConfigError, "decoder_layers=0 must be"),
    ("no_vocabulary", lambda: config(vocabulary=0), ConfigError, "vocabulary=0 must be"),
    ("text_size", lambda: config(d="14"), ConfigError, "d='14' is not a whole number"),
    ("float_size", lambda: config(f=17.0), ConfigError, r"f=17\.0 is not a whole number"),
    ("dropout", lambda: config(dropout=1.0), ConfigError, "not a probability below 1"),
    ("dropout_nan", lambda: config(dropout=float("nan")), ConfigError, "not a probability"),
    ("epsilon", lambda: config(norm_epsilon=0.0), ConfigError, "norm_epsilon=0.0 must be above 0"),
    ("logit_scale", lambda: config(logit_scale=-1.0), ConfigError, "above 0, or null"),
    ("token_outside", lambda: config(end=37), ConfigError, "choose an id from 0 to 36"),
    ("activation", lambda: config(activation="tanh"), ConfigError, "'relu' or 'gelu'"),
    (
        "language_with_encoder",
        lambda: config(encoder_layers=2),
        ConfigError,
        "a language model has no encoder; leave encoder_layers",
    ),
    (
        "translation_without_encoder",
        lambda: config("translation", encoder_layers=0),
        ConfigError,
        "encoder_layers=0 must be at least 1",
    ),
    (
        "unmatched",
        lambda: matched_d_ff(config(d=15), config()),
        ConfigError,
        "matched only where d is equal",
    ),
    ("write_heads", lambda: config().with_write_heads(4), ConfigError, "choose g from"),
]

ATTEND: list[Case] = [
    ("three_axes", lambda: attending(Q=random(h, n, k)), ShapeError, r"attend takes Q \[b, h, n"),
    ("empty_batch", lambda: attending(K=random(0, g, m, k)), ShapeError, "none of them empty"),
    ("no_write_heads", lambda: attending(K=random(b, 0, m, k)), ShapeError, "none of them empty"),
    ("no_memory", lambda: attending(K=random(b, g, 0, k)), ShapeError, "none of them empty"),
    ("unequal_k", lambda: attending(K=random(b, g, m, k + 1)), ShapeError, "Q and K in k"),
    ("unequal_m", lambda: attending(V=random(b, g, m + 1, v)), ShapeError, "must agree in"),
    ("unequal_g", lambda: attending(V=random(b, 3, m, v)), ShapeError, "must agree in"),
    ("g_not_dividing_h", lambda: attending(Q=random(b, 5, n, k)), ShapeError, "g must divide h"),
    ("rows", lambda: attending(Q=random(3, h, n, k)), ShapeError, "must divide the second"),
    ("integers", lambda: attending(Q=integers(b, h, n, k)), ShapeError, "one floating-point type"),
    ("mixed_dtypes", lambda: attending(K=random(b, g, m, k).float()), ShapeError, "one floating"),
    (
        "mixed_devices",
        lambda: attending(V=random(b, g, m, v).to("meta")),
        ShapeError,
        "V is on meta and Q on cpu; move them together",
    ),
    ("scale", lambda: attend(*tensors(), scale=0.0), ConfigError, r"usual one is k\*\*-0.5"),
    ("scale_nan", lambda: attend(*tensors(), scale=float("nan")), ConfigError, "must be above 0"),
    ("backend", lambda: attending(backend="spda"), ConfigError, "did you mean 'sdpa'"),
    ("far_backend", lambda: attending(backend="x"), ConfigError, "known: auto, .*, packed, sdpa"),
    ("unable_backend", lambda: attending(backend="sdpa"), BackendError, "use backend='auto'"),
    ("window", lambda: Visibility(window=0), ConfigError, "window=0 must be at least 1"),
    (
        "one_side_of_segments",
        lambda: Visibility(query_segments=integers(b, n)),
        ShapeError,
        "both query_segments and memory_segments, or neither",
    ),
    ("lengths", lambda: seeing(lengths=integers(m)), ShapeError, r"need integers \[2\]"),
    (
        "float_lengths",
        lambda: seeing(lengths=torch.ones(b)),
        ShapeError,
        r"lengths is torch.float32 \[2\]; .* need integers",
    ),
    (
        "lengths_elsewhere",
        lambda: seeing(lengths=integers(b).to("meta")),
        ShapeError,
        "lengths is on meta and Q on cpu",
    ),
    (
        "query_positions",
        lambda: seeing(query_positions=integers(b, m)),
        ShapeError,
        r"query_positions .* need integers \[2, 3\]",
    ),
    (
        "memory_positions",
        lambda: seeing(memory_positions=integers(b, n)),
        ShapeError,
        r"memory_positions .* need integers \[2, 5\]",
    ),
    (
        "segments",
        lambda: seeing(query_segments=integers(b, m), memory_segments=integers(b, n)),
        ShapeError,
        "query_segments",
    ),
    ("ancestors", lambda: seeing(ancestors=integers(b, n)), ShapeError, r"integers \[2, 5\]"),
    (
        "ancestors_outside",
        lambda: seeing(ancestors=integers(b, m) * b),
        ShapeError,
        "rows of K and V, from 0 to 1",
    ),
    ("negative_ancestors", lambda: seeing(ancestors=-integers(b, m)), ShapeError, "from 0 to 1"),
    ("causal_beams", lambda: shared_rows(causal=True), ShapeError, "a row of K and V for each"),
    ("window_beams", lambda: shared_rows(window=2), ShapeError, "a row of K and V for each"),
    (
        "ancestors_of_beams",
        lambda: shared_rows(ancestors=integers(b, m)),
        ShapeError,
        "a row of K and V for each",
    ),
    ("lengths_of_beams", lambda: shared_rows(lengths=integers(3 * b)), ShapeError, r"\[2\]"),
]

ATTENTION: list[Case] = [
    (
        "backend",
        lambda: Attention(attention_config(), backend="egaer"),
        ConfigError,
        "did you mean 'eager'",
    ),
    (
        "width",
        lambda: Attention(attention_config())(torch.ones(b, n, d + 1), WholePast(Visibility())),
        ShapeError,
        r"takes \[b, n, d=14\]; this input is \[2, 3, 15\]",
    ),
    (
        "axes",
        lambda: Attention(attention_config()).memorize(torch.ones(b, d), Visibility()),
        ShapeError,
        "attention takes",
    ),
    (
        "dtype",
        lambda: Attention(attention_config()).memorize(random(b, n, d), Visibility()),
        ShapeError,
        "this input is torch.float64 and the weights are torch.float32",
    ),
    (
        "device",
        lambda: Attention(attention_config()).memorize(
            torch.ones(b, n, d, device="meta"), Visibility()
        ),
        ShapeError,
        "on meta and the weights on cpu",
    ),
]

CACHE: list[Case] = [
    ("no_layers", lambda: cache(layers=0), CacheError, "layers=0 must be at least 1"),
    ("no_rows", lambda: cache(rows=-1), CacheError, "rows=-1 must be at least 1"),
    ("no_capacity", lambda: cache(capacity=0), CacheError, "capacity=0 must be at least 1"),
    ("rewindable", lambda: cache(rewindable=-1), CacheError, "must not be negative"),
    ("reserve_none", lambda: cache().reserve(0), CacheError, "reserve at least 1"),
    ("past_capacity", lambda: cache().reserve(m + 1), CacheFull, "start with max_length=6 or more"),
    ("ring_past", lambda: cache(window=2).reserve(m + 1), CacheFull, "max_length=6 or more"),
    ("counts_shape", lambda: cache().reserve(n, integers(n)), ShapeError, r"integers \[2\]"),
    ("counts_dtype", lambda: cache().reserve(n, torch.ones(b)), ShapeError, r"integers \[2\]"),
    ("counts_above", lambda: cache().reserve(n, integers(b) * 4), CacheError, "from 0 to 3"),
    ("counts_below", lambda: cache().reserve(n, -integers(b)), CacheError, "from 0 to 3"),
    (
        "counts_elsewhere",
        lambda: cache().reserve(n, integers(b).to("meta")),
        ShapeError,
        "counts is on meta and the cache on cpu",
    ),
    ("layer", lambda: cache().reserve(n).layer(3), CacheError, "no layer 3; .* 0 to 2"),
    ("negative_layer", lambda: cache().reserve(n).layer(-1), CacheError, "no layer -1"),
    (
        "k_shape",
        lambda: append(torch.ones(b, g, n, v), torch.ones(b, g, n, v)),
        ShapeError,
        r"K .* takes torch.float32 \[2, 2, 3, 5\]",
    ),
    (
        "v_shape",
        lambda: append(torch.ones(b, g, n, k), torch.ones(b, g, m, v)),
        ShapeError,
        r"V .* takes torch.float32 \[2, 2, 3, 7\]",
    ),
    (
        "k_dtype",
        lambda: append(random(b, g, n, k), torch.ones(b, g, n, v)),
        ShapeError,
        "K is torch.float64 .* takes torch.float32",
    ),
    (
        "v_device",
        lambda: append(torch.ones(b, g, n, k), torch.ones(b, g, n, v, device="meta")),
        ShapeError,
        "V is on meta and the cache on cpu",
    ),
    ("rewind", lambda: rewound(3), CacheError, "a row has only 2"),
    ("negative_rewind", lambda: rewound(-1), CacheError, "must not be negative"),
    ("reorder_shape", lambda: cache().reorder(integers(3)), ShapeError, r"torch.int64 \[2\]"),
    ("reorder_dtype", lambda: cache().reorder(torch.ones(b)), ShapeError, r"torch.int64 \[2\]"),
    ("reorder_outside", lambda: cache().reorder(integers(b) * 2), CacheError, "from 0 to 1"),
    ("reorder_negative", lambda: cache().reorder(-integers(b)), CacheError, "from 0 to 1"),
    (
        "reorder_elsewhere",
        lambda: cache().reorder(integers(b).to("meta")),
        ShapeError,
        "rows is on meta and the cache on cpu",
    ),
    ("expand", lambda: cache().expand(0), CacheError, "beam=0 must be at least 1"),
]

MODELS: list[Case] = [
    (
        "language_config",
        lambda: TranslationModel(config()),
        ConfigError,
        "makes a LanguageModel; use that class",
    ),
    (
        "translation_config",
        lambda: LanguageModel(config("translation")),
        ConfigError,
        "makes a TranslationModel; use that class",
    ),
    (
        "preset_name",
        lambda: make_model("tiny/multi-query"),
        ConfigError,
        r"not of 'tiny/multi-query'; preset\(name\) gives one",
    ),
    (
        "no_config",
        lambda: TranslationModel(None),
        ConfigError,
        "a ModelConfig, not of None",
    ),
    ("lists", lambda: language()([[1, 2]]), ShapeError, "tokens came as list; give a tensor"),
    ("list_source", lambda: translating([[1]], tokens(1, n)), ShapeError, "source came as list"),
    ("list_target", lambda: translating(tokens(1, m), [[1]]), ShapeError, "target came as list"),
    (
        "list_of_source_lengths",
        lambda: translating(tokens(b, m), tokens(b, n), source_lengths=[4, 3]),
        ShapeError,
        "source_lengths came as list; give a tensor of integers, as torch.tensor makes",
    ),
    ("backend", lambda: LanguageModel(config(), "sdap"), ConfigError, "did you mean 'sdpa'"),
    ("token", lambda: language()(integers(b, n) * 37), TokenError, "token 37 .* from 0 to 36"),
    ("negative_token", lambda: language()(-integers(b, n)), TokenError, "token -1 .* vocabulary"),
    ("float_tokens", lambda: language()(torch.ones(b, n)), ShapeError, "integers, not torch.float"),
    ("flat_tokens", lambda: language()(integers(n)), ShapeError, r"\[b, n\] and not empty"),
    ("no_tokens", lambda: language()(integers(b, 0)), ShapeError, "not empty"),
    ("tokens_elsewhere", lambda: language()(integers(b, n).to("meta")), ShapeError, "are on meta"),
    ("long", lambda: language()(tokens(b, 24)), ShapeError, "longer than the 23 learned"),
    (
        "packing_shape",
        lambda: language()(tokens(b, n), packing=packing(b, m)),
        ShapeError,
        r"needs integers \[2, 3\]",
    ),
    (
        "packing_dtype",
        lambda: language()(tokens(b, n), packing=Packing(torch.ones(b, n), integers(b, n))),
        ShapeError,
        "segments are torch.float32",
    ),
    (
        "packing_positions",
        lambda: language()(tokens(b, n), packing=Packing(integers(b, n), integers(b, n) * 23)),
        ShapeError,
        "from 0 to 22",
    ),
    (
        "packing_elsewhere",
        lambda: language()(
            tokens(b, n), packing=Packing(integers(b, n), integers(b, n).to("meta"))
        ),
        ShapeError,
        "positions are on meta",
    ),
    ("segments_shape", lambda: packing(n), ShapeError, r"segments must be \[b, n\]"),
    (
        "scalar_source",
        lambda: translating(torch.tensor(3), tokens(b, n)),
        ShapeError,
        "source must be",
    ),
    ("rows", lambda: translating(tokens(3, m), tokens(b, n)), ShapeError, "3 rows of source for 2"),
    ("target_token", lambda: translating(tokens(b, m), integers(b, n) * 40), TokenError, "target"),
    ("source_token", lambda: translating(integers(b, m) * 40, tokens(b, n)), TokenError, "source"),
    ("long_source", lambda: translating(tokens(b, 20), tokens(b, n)), ShapeError, "19 learned"),
    (
        "long_target",
        lambda: translating(tokens(b, m), tokens(b, 24)),
        ShapeError,
        "a target of 24 tokens is longer than the 23 learned",
    ),
    (
        "one_packing",
        lambda: translating(tokens(b, m), tokens(b, n), source_packing=packing(b, m)),
        ShapeError,
        "both the source and the target, or neither",
    ),
    (
        "lengths_and_packing",
        lambda: translation().encode(
            tokens(b, m), source_lengths=integers(b), packing=packing(b, m)
        ),
        ShapeError,
        "leave the lengths out",
    ),
    (
        "source_lengths_shape",
        lambda: translating(tokens(b, m), tokens(b, n), source_lengths=integers(3)),
        ShapeError,
        "source_lengths must be 2 integers",
    ),
    (
        "source_lengths_dtype",
        lambda: translating(tokens(b, m), tokens(b, n), source_lengths=torch.ones(b)),
        ShapeError,
        "they are torch.float32",
    ),
    (
        "source_lengths_above",
        lambda: translating(tokens(b, m), tokens(b, n), source_lengths=integers(b) * 6),
        ShapeError,
        "from 0 to 5",
    ),
    (
        "source_lengths_elsewhere",
        lambda: translation().encode(tokens(b, m), source_lengths=integers(b).to("meta")),
        ShapeError,
        "source_lengths are on meta",
    ),
]

DECODING: list[Case] = [
    ("scalar_source", lambda: translation().start(torch.tensor(3), n), ShapeError, "source must"),
    ("no_source", lambda: translation().start(integers(0, m), n), ShapeError, "not empty"),
    ("source_token", lambda: translation().start(integers(b, m) * 37, n), TokenError, "token 37"),
    ("no_length", lambda: translation().start(tokens(b, m), 0), ConfigError, "from 1 to 23"),
    ("too_long", lambda: translation().start(tokens(b, m), 24), ConfigError, "from 1 to 23"),
    ("list_source", lambda: translation().start([[1]], n), ShapeError, "source came as list"),
    ("list_prompt", lambda: language().start([[1]], n), ShapeError, "prompt came as list"),
    (
        "list_of_lengths",
        lambda: translation().start(tokens(b, m), n, source_lengths=[4, 3]),
        ShapeError,
        "source_lengths came as list",
    ),
    (
        "list_of_prompt_lengths",
        lambda: language().start(tokens(b, n), m, prompt_lengths=[2, 3]),
        ShapeError,
        "prompt_lengths came as list",
    ),
    ("list_stepped", lambda: stepping([1, 2]), ShapeError, "tokens came as list"),
    (
        "text_length",
        lambda: language().start(tokens(b, n), "5"),
        ConfigError,
        "max_length='5' is not a whole number",
    ),
    ("float_length", lambda: translation().start(tokens(b, m), 5.0), ConfigError, "max_length=5.0"),
    ("text_beam", lambda: state(beam="2"), ConfigError, "beam='2' is not a whole number"),
    ("text_in_options", lambda: DecodeConfig(beam="4"), ConfigError, "beam='4' is not a whole"),
    ("text_in_batching", lambda: Batching(tokens="4"), ConfigError, "tokens='4' is not a whole"),
    *(
        (
            f"options_of_{search.__name__}",
            lambda search=search: search(language().step, state(), {"beam": 1}, end=1),
            ConfigError,
            r"the options are \{'beam': 1\}, of type dict; give a DecodeConfig, such as",
        )
        for search in (greedy, beam_search, sample, stream)
    ),
    ("no_beam", lambda: translation().start(tokens(b, m), n, beam=0), ConfigError, "at least 1"),
    (
        "rewindable",
        lambda: translation().start(tokens(b, m), n, rewindable=-1),
        CacheError,
        "must not be negative",
    ),
    ("flat_prompt", lambda: language().start(tokens(n), m), ShapeError, "prompt must be"),
    ("prompt_token", lambda: language().start(-integers(b, n), m), TokenError, "in prompt"),
    ("long_prompt", lambda: language().start(tokens(b, n), 2), ConfigError, "max_length=2; raise"),
    ("negative_beam", lambda: state(beam=-1), ConfigError, "beam=-1 must be at least 1"),
    (
        "empty_prompt_row",
        lambda: language().start(tokens(b, n), m, prompt_lengths=torch.tensor([n, 0])),
        ShapeError,
        "prompt_lengths must be from 1 to 3",
    ),
    ("step_shape", lambda: stepping(tokens(b, 1)), ShapeError, r"step takes tokens \[rows\]"),
    ("step_rows", lambda: stepping(tokens(3)), ShapeError, "3 rows of tokens for a state of 2"),
    ("step_token", lambda: stepping(integers(b) * 37), TokenError, "token 37 in tokens"),
    ("step_negative", lambda: stepping(-integers(b)), TokenError, "token -1 in tokens"),
    ("step_dtype", lambda: stepping(torch.ones(b)), ShapeError, "must be integers"),
    ("step_device", lambda: stepping(tokens(b).to("meta")), ShapeError, "are on meta"),
    ("full", filled, CacheFull, "position 2 is past capacity 2; start with max_length=3 or more"),
    (
        "extend_counts",
        lambda: language().extend(tokens(b, n), state(), integers(b) * 4),
        CacheError,
        "counts must be from 0 to 3",
    ),
    (
        "extend_shape",
        lambda: language().extend(tokens(b), state()),
        ShapeError,
        r"tokens must be \[b, n\]",
    ),
    (
        "another_window",
        lambda: stepping(tokens(b), model(config(window=2)).start(tokens(b, 1), m)),
        ShapeError,
        "another model's; use the one that start returned",
    ),
    (
        "another_depth",
        lambda: stepping(tokens(b), model(config(decoder_layers=2)).start(tokens(b, 1), m)),
        ShapeError,
        "another model's",
    ),
    (
        "another_task",
        lambda: translation().step(tokens(b), state()),
        ShapeError,
        "another model's",
    ),
    (
        "another_dtype",
        lambda: model(config(), dtype=torch.float32).step(tokens(b), state()),
        ShapeError,
        "the cache takes torch.float64",
    ),
    ("expand_none", lambda: state().expand(-1), CacheError, "beam=-1 must be at least 1"),
    ("expand_twice", lambda: state(beam=2).expand(2), CacheError, "has 2 beams already"),
    ("reorder_shape", lambda: state().reorder(integers(3)), ShapeError, r"torch.int64 \[2\]"),
    (
        "reorder_sentences",
        lambda: translation().start(tokens(b, m), n, beam=2).reorder(torch.tensor([0, 2, 2, 3])),
        CacheError,
        "a beam of its own sentence",
    ),
    ("rewind", lambda: state().rewind(1), CacheError, "a row has only 0"),
]


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        pytest.param(*case, id=f"{room}-{name}")
        for room, cases in (
            ("config", CONFIG),
            ("attend", ATTEND),
            ("attention", ATTENTION),
            ("cache", CACHE),
            ("models", MODELS),
            ("decoding", DECODING),
        )
        for name, *case in cases
    ],
)
def test_bad_input_is_answered_with_what_to_do(call, error, sentence):
    with pytest.raises(WriteheadError) as caught:
        call()
    assert caught.type is error
    assert re.search(sentence, str(caught.value)), str(caught.value)


def test_good_input_to_the_same_entries_is_accepted():
    attending()
    seeing(lengths=integers(b), ancestors=integers(b, m))
    shared_rows(lengths=integers(b))
    append(torch.ones(b, g, n, k), torch.ones(b, g, n, v))
    rewound(2)
    language()(tokens(b, n), packing=packing(b, n))
    translating(tokens(b, m), tokens(b, n), source_lengths=integers(b))
    language().extend(tokens(b, n), state(), integers(b) * 3)
    assert stepping(tokens(b)).isfinite().all()
