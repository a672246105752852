"""Equality is a contract: forward = n steps = any batch, padding, beam slot or cache kind."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from helpers import additive, causal_mask, config, model, packing, projections, tokens
from writehead.config import ModelConfig
from writehead.errors import ConfigError, TokenError
from writehead.model import Attention, DecoderState, LanguageModel, TranslationModel
from writehead.model.layers import Stack
from writehead.paper.listings import MultiheadAttentionBatched

b, m, n = 2, 11, 9

VARIANTS: list[dict[str, object]] = [
    {"g": 6},
    {"g": 3},
    {"g": 2, "v": 5},  # equal depths, as PyTorch's attention wants them
    {"window": 1},
    {"g": 2, "window": 4},
    {"norm": "layer", "bias": True, "activation": "gelu"},
    {"activation": "gelu_tanh", "tied": False, "logit_scale": 0.3},
    # the variants of other model families
    {"norm_place": "post", "norm": "layer", "bias": True, "activation": "silu", "g": 6}
    | {"positions": "sinusoidal", "embedding_scale": 3.7, "output_bias": True},
    {"norm": "layer", "bias": True, "positions": "sinusoidal", "position_offset": 2, "g": 6},
    {"positions": "rotary", "k": 6, "gated": True, "activation": "silu", "g": 2, "tied": False}
    | {"rotary_base": 50.0},
    {"positions": "rotary", "k": 6, "gated": True, "activation": "gelu_tanh", "window": 4},
    {"position_offset": 2, "output_bias": True, "norm_offset": 1.0},
    {"positions": "rotary", "k": 8, "rotary_base": 9.0, "rotary_factor": 3.0, "rotary_original": 8},
    {"positions": "sinusoidal", "sinusoid": "d-2"},
    {"positions": "relative", "relative_buckets": 6, "relative_distance": 5, "g": 2},
    {"positions": "relative", "attention_scale": 1.0, "gated": True, "window": 4, "bias": True},
]
# the encoder differs from the decoder
ENCODERS: list[dict[str, object]] = [{"encoder_g": 6, "cross_g": 2}, {"source_vocab_size": 41}]
every_task = pytest.mark.parametrize("task", ["translation", "language"])
every_window = pytest.mark.parametrize("window", [None, 4, 30])
Model = TranslationModel | LanguageModel


def forward(made: Model, source: Tensor, fed: Tensor) -> Tensor:
    """Training's form of either model; a language model takes no note of the source."""
    return made(source, fed) if isinstance(made, TranslationModel) else made(fed)


def step_through(made: Model, fed: Tensor, state: DecoderState) -> Tensor:
    """Logits [rows, n, vocab_size] of fed [rows, n], one token at a time."""
    return torch.stack([made.step(column, state) for column in fed.unbind(1)], dim=1)


def start(made: Model, source: Tensor, fed: Tensor, max_length: int, **options) -> DecoderState:
    """A state that has read nothing of `fed` yet."""
    prompt = source if isinstance(made, TranslationModel) else fed[:, :1]
    return made.start(prompt, max_length, **options)


@pytest.mark.parametrize(
    ("task", "variant"),
    [
        *(("translation", variant) for variant in (*VARIANTS, *ENCODERS)),
        *(("language", variant) for variant in VARIANTS),
    ],
    ids=str,
)
def test_decoding_step_by_step_equals_one_forward_pass(variant, task):
    made, source, fed = model(config(task, **variant)), tokens(b, m), tokens(b, n)
    whole = forward(made, source, fed)
    assert_close(step_through(made, fed, start(made, source, fed, n)), whole)
    made.pack()
    assert_close(step_through(made, fed, start(made, source, fed, n)), whole)
    assert_close(forward(made, source, fed), whole)


def test_training_and_loading_undo_packing():
    made, fed = model(config()), tokens(b, n)
    expected = made.pack()(fed)
    with torch.no_grad():
        made.train().tokens.weight.add_(1.0)
    assert not torch.allclose(made.eval()(fed), expected)
    other = model(config()).pack()
    other.load_state_dict(made.state_dict())
    assert_close(other(fed), made(fed))


@every_task
@every_window
@pytest.mark.parametrize(
    ("backend", "options", "sizes"),
    [
        ("eager", {}, (1,) * n),
        ("sdpa", {}, (1,) * n),
        ("auto", {"padded": True}, (1,) * n),
        ("auto", {}, (9,)),
        ("auto", {}, (1, 5, 3)),
        ("auto", {}, (6, 1, 1, 1)),
    ],
)
def test_any_backend_cache_and_pieces_equal_one_forward_pass(backend, options, sizes, window, task):
    cfg = config(task, v=5, window=window)
    made, plain = model(cfg, backend=backend), model(cfg)
    plain.load_state_dict(made.state_dict())
    source, fed = tokens(b, m), tokens(b, n)
    state = start(made, source, fed, n, **options)
    pieces = [made.extend(piece, state) for piece in fed.split(sizes, dim=1)]
    right = forward(plain, source, fed)
    assert_close(torch.cat(pieces, dim=1), right)
    assert_close(forward(made, source, fed), right)
    assert state.cache.lengths.tolist() == [n] * b


def norm(module: nn.Module, X: Tensor, cfg: ModelConfig) -> Tensor:
    """The norm written out."""
    if cfg.norm == "layer":
        X = X - X.mean(dim=-1, keepdim=True)
    X = X / (X.square().mean(dim=-1, keepdim=True) + cfg.norm_epsilon).sqrt()
    return X * module.weight


def listing(module: Attention, X: Tensor, M: Tensor, mask: Tensor) -> Tensor:
    return MultiheadAttentionBatched(X, M, mask, *projections(module))


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


@every_task
@pytest.mark.parametrize(
    "changes",
    [{"g": 6}, {"g": 3, "window": 4, "norm": "layer"}, {"tied": False, "activation": "gelu"}],
    ids=str,
)
def test_a_model_is_its_layers_written_out_with_the_listings(changes, task):
    made, source, fed = model(config(task, **changes)), tokens(b, m), tokens(b, n)
    cfg, E, M = made.config, made.tokens.weight, None
    if task == "translation":
        everything = additive(torch.ones(b, cfg.h, m, m, dtype=torch.bool))
        M = written_out(made.encoder, E[source], cfg, everything)
        assert_close(made.encode(source), M)
    X = written_out(made.decoder, E[fed], cfg, causal_mask(b, cfg.h, n, cfg.window), M)
    expected = X @ E.T * cfg.d**-0.5 if cfg.tied else X @ made.output.weight.T
    assert_close(forward(made, source, fed), expected)


def padded_rows(width: int, *lengths: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Random tokens [rows, width], how many of each row count, and those alone."""
    rows = tokens(len(lengths), width)
    alone = [row[:length].unsqueeze(0) for row, length in zip(rows, lengths, strict=True)]
    return rows, torch.tensor(lengths), alone


def test_a_sentence_alone_equals_itself_in_any_batch_and_padding():
    made, fed = model(config("translation", g=2)), tokens(4, n)
    source, lengths, sources = padded_rows(m + 2, m, 3, 1, 0)
    together = made(source, fed, source_lengths=lengths)
    for row, alone in enumerate(sources[:3]):
        assert_close(together[row], made(alone, fed[row : row + 1])[0])
    # a source of padding only is finite, and its tokens do not matter
    assert torch.isfinite(together).all()
    assert_close(together[3], made(tokens(4, m + 2), fed, source_lengths=lengths)[3])


@every_task
@every_window
@pytest.mark.parametrize(("v", "expand"), [(5, False), (7, True)])
def test_reordered_beams_of_uneven_rows_equal_their_own_histories(v, expand, window, task):
    made, beam = model(config(task, v=v, window=window)), 3
    read, lengths, alone = padded_rows(6 if expand else 8, 6, 2)
    name = "source_lengths" if task == "translation" else "prompt_lengths"
    state = made.start(read, 12, beam=1 if expand else beam, **{name: lengths})
    state = state.expand(beam) if expand else state
    read = 0 if task == "translation" else lengths - 1  # all but the last token, which is fed first
    assert_close(state.cache.lengths, (read + 0 * lengths).repeat_interleave(beam))
    histories = [[] if task == "translation" else one[0, :-1].tolist() for one in alone]
    histories = [list(one) for one in histories for _ in range(beam)]
    fed = state.first
    for rows in ([1, 1, 0, 3, 5, 4], [2, 0, 2, 4, 4, 4], [0, 1, 2, 3, 4, 5], [2, 1, 0, 3, 3, 5]):
        logits = made.step(fed, state)
        for row, token in enumerate(fed.tolist()):
            histories[row].append(token)
            right = forward(made, alone[row // beam], torch.tensor([histories[row]]))
            assert_close(logits[row], right[0, -1])
        state.reorder(torch.tensor(rows))
        histories = [list(histories[row]) for row in rows]
        fed = tokens(b * beam)


@every_window
def test_packed_sentences_equal_themselves_alone(window):
    made = model(config("translation", window=window, g=2))
    source, fed = tokens(b, 13), tokens(b, 12)
    sources = torch.tensor([[1] * 4 + [2] * 7 + [0] * 2, [1] * 13])
    targets = torch.tensor([[1] * 6 + [2] * 3 + [0] * 3, [1] * 12])
    source_packing, target_packing = map(packing, (sources, targets))
    packed = made(source, fed, source_packing=source_packing, target_packing=target_packing)
    assert_close(packed[:1, :6], made(source[:1, :4], fed[:1, :6]))
    assert_close(packed[:1, 6:9], made(source[:1, 4:11], fed[:1, 6:9]))
    assert_close(packed[1:], made(source[1:], fed[1:]))


@pytest.mark.parametrize("g", [6, 1])
def test_the_encoders_k_and_v_exist_once_per_sentence(g):
    made, beam = model(config("translation", g=g)), 4
    cfg, state = made.config, made.start(tokens(b, m), n, beam=beam)
    positions = b * m + b * beam * n
    assert state.nbytes == 3 * positions * g * (cfg.k + cfg.v) * 8
    assert made.start(tokens(b, m), n).expand(beam).nbytes == state.nbytes
    assert state.first.tolist() == [cfg.bos] * b * beam


@every_task
@every_window
@pytest.mark.parametrize(("padded", "v"), [(False, 5), (True, 7)])
def test_a_step_never_waits_for_its_device(v, padded, window, task):
    # tensors on the meta device have no values, so looking at one is an error
    made = model(config(task, v=v, window=window)).to("meta")
    fed = tokens(b * 2, n).to("meta")
    state = start(made, tokens(b, m).to("meta"), fed[:b], n, beam=2, padded=padded)
    for i in range(n - 3):
        assert made.step(fed[:, i], state).shape == (b * 2, 37)
        state.reorder(torch.arange(b * 2, device="meta"))
    made.step(fed[:, -1], state)


@every_task
def test_training_has_dropout_and_gradients_and_refuses_decoding(task):
    made = model(config(task, bias=True, norm="layer", tied=False, dropout=0.5)).train()
    source, fed = tokens(b, m), tokens(b, n)
    assert not torch.equal(forward(made, source, fed), forward(made, source, fed))
    forward(made, source, fed).square().sum().backward()
    assert [name for name, P in made.named_parameters() if P.grad is None] == []
    with pytest.raises(ConfigError, match=r"call model.eval\(\) first"):
        start(made, source, fed, n)
    made.eval()
    assert torch.equal(forward(made, source, fed), forward(made, source, fed))
    state = start(made, source, fed, n)
    with pytest.raises(TokenError):
        made.step(torch.tensor([0, 99]), state)
    assert state.cache.lengths.tolist() == [0] * b  # a step that fails counts for nothing
    assert not made.step(fed[:, 0], state).requires_grad
