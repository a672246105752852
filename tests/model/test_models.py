"""Equality is a contract: forward = n steps = any batch, padding, beam slot or cache kind."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from helpers import additive, causal_mask, config, model, step_through, tokens
from writehead.config import ModelConfig
from writehead.errors import ConfigError
from writehead.model import (
    Attention,
    DecoderState,
    LanguageModel,
    Packing,
    TranslationModel,
)
from writehead.model.layers import Stack
from writehead.paper.listings import MultiheadAttentionBatched

b, m, n = 2, 11, 9

VARIANTS: dict[str, dict[str, object]] = {
    "multi_head": {"g": 6},
    "grouped": {"g": 3},
    "multi_query": {"g": 1},
    "fused": {"g": 2, "v": 5},
    "window_of_one": {"window": 1},
    "window": {"g": 2, "window": 4},
    "window_past_the_length": {"window": 20},
    "fused_window": {"v": 5, "window": 4},
    "layer_norm_and_biases": {"norm": "layer", "bias": True, "activation": "gelu"},
    "layer_norm_without_biases": {"norm": "layer", "activation": "gelu_tanh"},
    "untied": {"tied": False},
    "logit_scale": {"logit_scale": 0.3},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_task = pytest.mark.parametrize("task", ["translation", "language"])
every_window = pytest.mark.parametrize("window", [None, 4, 30])
Model = TranslationModel | LanguageModel


def forward(made: Model, source: Tensor, fed: Tensor) -> Tensor:
    """Training's form of either model; a language model takes no note of the source."""
    return made(source, fed) if isinstance(made, TranslationModel) else made(fed)


def start(made: Model, source: Tensor, fed: Tensor, max_length: int, **options) -> DecoderState:
    """A state that has read nothing of `fed` yet."""
    prompt = source if isinstance(made, TranslationModel) else fed[:, :1]
    return made.start(prompt, max_length, **options)


@every_task
@every_variant
def test_decoding_step_by_step_equals_one_forward_pass(variant, task):
    made = model(config(task, **VARIANTS[variant]))
    source, fed = tokens(b, m), tokens(b, n)

    stepped = step_through(made, fed, start(made, source, fed, n))

    assert_close(stepped, forward(made, source, fed))


@every_task
@every_window
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_either_backend_gives_the_same_logits(backend, window, task):
    cfg = config(task, v=5, window=window)
    asked, auto = model(cfg, backend=backend), model(cfg)
    auto.load_state_dict(asked.state_dict())
    source, fed = tokens(b, m), tokens(b, n)

    assert_close(forward(asked, source, fed), forward(auto, source, fed))
    stepped = step_through(asked, fed, start(asked, source, fed, n))
    assert_close(stepped, forward(auto, source, fed))


def norm(module: nn.Module, X: Tensor, cfg: ModelConfig) -> Tensor:
    """The norm written out."""
    if cfg.norm == "layer":
        X = X - X.mean(dim=-1, keepdim=True)
    X = X / (X.square().mean(dim=-1, keepdim=True) + cfg.norm_epsilon).sqrt()
    return X * module.weight


def listing(module: Attention, X: Tensor, M: Tensor, mask: Tensor) -> Tensor:
    """Attention by the paper's multi-head listing, the write-heads repeated."""
    d, h, g, k, v = (getattr(module.config, name) for name in "dhgkv")
    P_k, P_v = (
        P.weight.view(g, depth, d).transpose(1, 2).repeat_interleave(h // g, dim=0)
        for P, depth in ((module.P_k, k), (module.P_v, v))
    )
    P_q = module.P_q.weight.view(h, k, d).transpose(1, 2) * k**-0.5
    P_o = module.P_o.weight.view(d, h, v).transpose(0, 1)
    return MultiheadAttentionBatched(X, M, mask, P_q, P_k, P_v, P_o)


def written_out(
    stack: Stack, X: Tensor, cfg: ModelConfig, mask: Tensor, M: Tensor | None = None
) -> Tensor:
    """One side of a model in the paper's own terms."""
    act = {
        "relu": lambda x: x.clamp(min=0.0),
        "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    }[cfg.activation]
    X = X + stack.positions.weight[: X.shape[1]]
    for layer in stack.layers:
        normed = norm(layer.norm_attention, X, cfg)
        X = X + listing(layer.attention, normed, normed, mask)
        if M is not None:
            everything = torch.zeros(*mask.shape[:3], M.shape[1], dtype=X.dtype)
            X = X + listing(layer.cross, norm(layer.norm_cross, X, cfg), M, everything)
        wide = act(norm(layer.norm_feed_forward, X, cfg) @ layer.feed_forward.widen.weight.T)
        X = X + wide @ layer.feed_forward.narrow.weight.T
    return norm(stack.norm, X, cfg)


@pytest.mark.parametrize(
    "changes",
    [{"g": 6}, {"g": 3, "window": 4, "norm": "layer"}, {"tied": False, "activation": "gelu"}],
)
def test_a_language_model_is_its_layers_written_out_with_the_listings(changes):
    made, fed = model(config(**changes)), tokens(b, n)
    cfg = made.config
    E = made.tokens.weight

    X = written_out(made.decoder, E[fed], cfg, causal_mask(b, cfg.h, n, cfg.window))

    expected = X @ E.T * cfg.d**-0.5 if cfg.tied else X @ made.output.weight.T
    assert_close(made(fed), expected)


@pytest.mark.parametrize("changes", [{"g": 6}, {"g": 2, "window": 4, "norm": "layer"}])
def test_a_translation_model_is_its_layers_written_out_with_the_listings(changes):
    made, source, fed = model(config("translation", **changes)), tokens(b, m), tokens(b, n)
    cfg = made.config
    E = made.tokens.weight

    everything = additive(torch.ones(b, cfg.h, m, m, dtype=torch.bool))
    M = written_out(made.encoder, E[source], cfg, everything)
    X = written_out(made.decoder, E[fed], cfg, causal_mask(b, cfg.h, n, cfg.window), M)

    assert_close(made.encode(source), M)
    assert_close(made(source, fed), X @ E.T * cfg.d**-0.5)


@every_task
@every_window
@pytest.mark.parametrize("sizes", [(9,), (2, 7), (1, 5, 3), (6, 1, 1, 1)])
def test_extending_in_pieces_equals_one_forward_pass(sizes, window, task):
    made = model(config(task, window=window))
    source, fed = tokens(b, m), tokens(b, n)
    state = start(made, source, fed, n)

    pieces = [made.extend(piece, state) for piece in fed.split(sizes, dim=1)]

    assert_close(torch.cat(pieces, dim=1), forward(made, source, fed))
    assert state.positions.tolist() == [n] * b


@every_window
def test_a_prompt_is_read_but_for_its_last_token(window):
    made, fed = model(config(window=window)), tokens(b, n)

    state = made.start(fed[:, :5], n)

    assert torch.equal(state.first, fed[:, 4])
    assert state.positions.tolist() == [4] * b
    assert_close(step_through(made, fed[:, 4:], state), made(fed)[:, 4:])


@every_task
@pytest.mark.parametrize("window", [1, 4])
def test_a_ring_equals_a_whole_cache_under_a_window(window, task):
    made = model(config(task, window=window))
    source, fed = tokens(b, m), tokens(b, n)
    ring = start(made, source, fed, n)
    # room to rewind makes the ring as long as the capacity, so that nothing is overwritten
    whole = start(made, source, fed, n, rewindable=n)
    assert (ring.cache.size, whole.cache.size) == (window, n)

    assert_close(step_through(made, fed, ring), step_through(made, fed, whole))


@every_task
@every_window
def test_a_padded_state_gives_the_same_logits(window, task):
    made = model(config(task, window=window))
    source, fed = tokens(b, m), tokens(b, n)

    stepped = step_through(made, fed, start(made, source, fed, 15, padded=True))

    assert_close(stepped, forward(made, source, fed))


@every_task
@every_window
def test_steps_rewound_and_redone_equal_one_forward_pass(window, task):
    made = model(config(task, window=window))
    source, fed = tokens(b, m), tokens(b, n)
    state = start(made, source, fed, n, rewindable=3)

    step_through(made, torch.cat([fed[:, :6], tokens(b, 2)], dim=1), state)
    state.rewind(3)

    assert_close(step_through(made, fed[:, 5:], state), forward(made, source, fed)[:, 5:])


@pytest.mark.parametrize("v", [5, 7])
@pytest.mark.parametrize("width", [m, m + 6])
def test_a_sentence_alone_equals_itself_in_any_batch_and_padding(width, v):
    made = model(config("translation", g=2, v=v))
    lengths, fed = [m, 3, 1], tokens(3, n)
    sources = [tokens(1, length) for length in lengths]
    padded = tokens(3, width)
    for row, source in enumerate(sources):
        padded[row, : lengths[row]] = source

    together = made(padded, fed, source_lengths=torch.tensor(lengths))
    state = made.start(padded, n, source_lengths=torch.tensor(lengths))
    stepped = step_through(made, fed, state)

    for row, source in enumerate(sources):
        alone = made(source, fed[row : row + 1])
        assert_close(together[row : row + 1], alone)
        assert_close(stepped[row : row + 1], alone)


def test_a_source_of_padding_only_is_finite_and_says_nothing_of_its_tokens():
    made, fed, lengths = model(config("translation")), tokens(b, n), torch.tensor([0, m])

    logits = made(tokens(b, m), fed, source_lengths=lengths)

    assert torch.isfinite(logits).all()
    assert_close(logits[0], made(tokens(b, m), fed, source_lengths=lengths)[0])


@every_window
@pytest.mark.parametrize("width", [6, 9])
@pytest.mark.parametrize("v", [5, 7])
def test_a_prompt_alone_equals_itself_in_any_batch_and_padding(v, width, window):
    made = model(config(g=2, v=v, window=window))
    lengths, more = [6, 1, 3], tokens(3, 5)
    prompts = [tokens(1, length) for length in lengths]
    padded = tokens(3, width)
    for row, prompt in enumerate(prompts):
        padded[row, : lengths[row]] = prompt

    state = made.start(padded, 14, prompt_lengths=torch.tensor(lengths))
    first = made.step(state.first, state)
    stepped = torch.cat([first.unsqueeze(1), step_through(made, more, state)], dim=1)

    for row, prompt in enumerate(prompts):
        whole = made(torch.cat([prompt, more[row : row + 1]], dim=1))
        assert_close(stepped[row : row + 1], whole[:, lengths[row] - 1 :])


@every_window
def test_uneven_pieces_equal_each_row_alone(window):
    made = model(config(window=window))
    fed = tokens(2, 12)
    state = made.start(fed[:, :1], 12)
    taken, logits = [0, 0], [[], []]

    for counts in ([3, 1], [0, 6], [5, 2], [1, 0]):
        piece = tokens(2, 6)
        for row, count in enumerate(counts):
            piece[row, :count] = fed[row, taken[row] : taken[row] + count]
        answer = made.extend(piece, state, torch.tensor(counts))
        for row, count in enumerate(counts):
            logits[row].append(answer[row, :count])
            taken[row] += count

    assert state.positions.tolist() == taken == [9, 9]
    for row in range(2):
        assert_close(torch.cat(logits[row]), made(fed[row : row + 1, :9])[0])


@every_task
@every_window
@pytest.mark.parametrize("expand", [False, True])
def test_a_beam_slot_equals_the_sentence_alone(expand, window, task):
    made, beam = model(config(task, window=window)), 3
    source, fed = tokens(b, m), tokens(b, 1).repeat_interleave(beam, dim=0)
    fed = torch.cat([fed, tokens(b * beam, n - 1)], dim=1)

    if expand:
        state = start(made, source, fed[::beam], n).expand(beam)
    else:
        state = start(made, source, fed[::beam], n, beam=beam)

    stepped = step_through(made, fed, state)
    assert_close(stepped, forward(made, source.repeat_interleave(beam, dim=0), fed))


@every_task
@every_window
@pytest.mark.parametrize("v", [5, 7])
def test_reordered_beams_equal_their_own_histories(v, window, task):
    made, beam = model(config(task, v=v, window=window)), 3
    source, prompt = tokens(b, m), tokens(b, 4)
    if task == "translation":
        state, histories = made.start(source, n, beam=beam), torch.empty(b * beam, 0)
    else:
        state = made.start(prompt, n, beam=beam)
        histories = prompt[:, :-1].repeat_interleave(beam, dim=0)
    source = source.repeat_interleave(beam, dim=0)

    for rows in ([1, 1, 0, 3, 5, 4], [2, 0, 2, 4, 4, 4], [0, 1, 2, 3, 4, 5], [2, 1, 0, 3, 3, 5]):
        fed = tokens(b * beam)
        histories = torch.cat([histories, fed.unsqueeze(1)], dim=1).long()
        logits = made.step(fed, state)
        assert_close(logits, forward(made, source, histories)[:, -1])
        state.reorder(torch.tensor(rows))
        histories = histories[rows]


def test_uneven_prompts_share_their_beams_prefix():
    made, beam, lengths = model(config(window=4)), 2, [6, 2]
    prompt, more = tokens(b, 6), tokens(b * beam, 5)

    state = made.start(prompt, 12, prompt_lengths=torch.tensor(lengths), beam=beam)
    first = made.step(state.first, state).unsqueeze(1)
    stepped = torch.cat([first, step_through(made, more, state)], dim=1)

    for row in range(b * beam):
        length = lengths[row // beam]
        whole = torch.cat([prompt[row // beam, :length], more[row]]).unsqueeze(0)
        assert_close(stepped[row], made(whole)[0, length - 1 :])


@every_window
def test_packed_sequences_equal_themselves_alone(window):
    made = model(config(window=window))
    fed, segments = tokens(1, 14), torch.tensor([[1] * 5 + [2] * 1 + [3] * 6 + [0] * 2])

    packed = made(fed, packing=Packing.from_segments(segments))

    for begin, end in ((0, 5), (5, 6), (6, 12)):
        assert_close(packed[:, begin:end], made(fed[:, begin:end]))


@every_window
def test_packed_sentences_equal_themselves_alone(window):
    made = model(config("translation", window=window, g=2))
    source, fed = tokens(b, 13), tokens(b, 12)
    source_segments = torch.tensor([[1] * 4 + [2] * 7 + [0] * 2, [1] * 13])
    target_segments = torch.tensor([[1] * 6 + [2] * 3 + [0] * 3, [1] * 12])

    packed = made(
        source,
        fed,
        source_packing=Packing.from_segments(source_segments),
        target_packing=Packing.from_segments(target_segments),
    )

    assert_close(packed[:1, :6], made(source[:1, :4], fed[:1, :6]))
    assert_close(packed[:1, 6:9], made(source[:1, 4:11], fed[:1, 6:9]))
    assert_close(packed[1:], made(source[1:], fed[1:]))


def test_positions_begin_again_in_each_segment_and_stay_at_zero_in_padding():
    segments = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0, 0], [4, 4, 0, 0, 7, 7, 7, 7, 7]])

    packing = Packing.from_segments(segments)

    expected = [[0, 1, 2, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 2, 3, 4]]
    assert packing.positions.tolist() == expected


def test_padding_longer_than_the_learned_positions_can_be_packed():
    made = model(config(target_positions=4))
    fed = tokens(1, 10)
    packing = Packing.from_segments(torch.tensor([[1] * 4 + [0] * 6]))
    assert_close(made(fed, packing=packing)[:, :4], made(fed[:, :4]))


@pytest.mark.parametrize("g", [6, 2, 1])
def test_the_encoders_k_and_v_exist_once_a_sentence(g):
    made, beam, itemsize = model(config("translation", g=g)), 4, 8
    cfg = made.config

    state = made.start(tokens(b, m), n, beam=beam)

    assert [memory.K.shape for memory in state.memories] == [(b, g, m, cfg.k)] * 3
    assert [memory.V.shape for memory in state.memories] == [(b, g, m, cfg.v)] * 3
    positions = b * m + b * beam * n
    assert state.nbytes == 3 * positions * g * (cfg.k + cfg.v) * itemsize
    assert (state.rows, state.first.tolist()) == (b * beam, [cfg.start] * b * beam)
    wide = made.start(tokens(b, m), n).expand(beam)
    assert wide.nbytes == state.nbytes


@every_task
def test_only_a_step_advances_the_positions(task):
    made = model(config(task))
    source, fed = tokens(b, m), tokens(b, n)
    state = start(made, source, fed, n)

    for i in range(4):
        assert state.positions.tolist() == [i] * b
        forward(made, source, fed)
        state.reorder(torch.arange(b))
        with pytest.raises(ValueError, match="outside the vocabulary"):
            made.step(torch.tensor([0, 99]), state)
        assert state.positions.tolist() == [i] * b
        made.step(fed[:, i], state)


@every_task
@every_window
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("v", [5, 7])
def test_a_step_never_waits_for_its_device(v, padded, window, task):
    # tensors on the meta device have no values, so looking at one is an error
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="meta").item()
    made = model(config(task, v=v, window=window)).to("meta")
    fed = tokens(b * 2, n).to("meta")
    state = start(made, tokens(b, m).to("meta"), fed[:b], n, beam=2, rewindable=2, padded=padded)

    for i in range(n - 1):
        assert made.step(fed[:, i], state).shape == (b * 2, 37)
        state.reorder(torch.arange(b * 2, device="meta"))
    state.rewind(2)
    assert made.extend(fed[:, :2], state).shape == (b * 2, 2, 37)
    made.step(fed[:, -1], state)


@every_task
def test_decoding_in_training_mode_is_refused(task):
    cfg = dataclasses.replace(config(task), dropout=0.1)
    made, fed = model(cfg).train(), tokens(b, n)
    with pytest.raises(ConfigError, match=r"call model.eval\(\) first"):
        start(made, tokens(b, m), fed, n)
    start(made.eval(), tokens(b, m), fed, n)


@every_task
def test_dropout_acts_in_training_and_not_in_evaluation(task):
    made = model(dataclasses.replace(config(task), dropout=0.5)).train()
    source, fed = tokens(b, m), tokens(b, n)
    assert not torch.equal(forward(made, source, fed), forward(made, source, fed))
    made.eval()
    assert torch.equal(forward(made, source, fed), forward(made, source, fed))


@every_task
def test_a_step_keeps_no_graph_and_forward_reaches_every_parameter(task):
    made = model(config(task, bias=True, norm="layer", tied=False))
    source, fed = tokens(b, m), tokens(b, n)

    assert not made.step(fed[:, 0], start(made, source, fed, n)).requires_grad
    forward(made, source, fed).square().sum().backward()

    assert [name for name, P in made.named_parameters() if P.grad is None] == []


@every_task
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 4])
def test_steps_in_low_precision_err_at_most_twice_as_much_as_forward(window, dtype, task):
    cfg = config(task, window=window, v=5)
    made, exact = model(cfg, dtype=dtype), model(cfg)
    exact.load_state_dict(made.state_dict())
    source, fed = tokens(b, m), tokens(b, n)

    stepped = step_through(made, fed, start(made, source, fed, n))

    assert stepped.dtype == dtype
    right = forward(exact, source, fed)
    allowed = (forward(made, source, fed) - right).abs()
    error = (stepped - right).abs()
    assert error.max() <= 2 * allowed.max()
    assert error.mean() <= 2 * allowed.mean()
