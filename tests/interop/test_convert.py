"""Conversion to fewer write-heads: what is exact, by hand, and on heads that are rotations."""

from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import config, model, random
from writehead import cost
from writehead.config import ModelConfig
from writehead.errors import ConfigError, RunError
from writehead.interop.convert import (
    METHODS,
    Heads,
    align_weights,
    balanced_groups,
    convert,
    convert_weights,
    rotation_onto,
)
from writehead.interop.quantize import quantize_run
from writehead.model import make_model
from writehead.runs import load_run, save_run

HEADS = {"h": 8, "g": 8, "decoder_layers": 2}
FAMILIES = {
    "plain": config("translation", **HEADS),
    "biases": config("translation", bias=True, norm="layer", **HEADS),
    "post-norm": config("translation", bias=True, norm="layer", norm_place="post", **HEADS),
    "rotary": config("language", positions="rotary", bias=True, k=6, **{**HEADS, "h": 4, "g": 4}),
    "rotary, cross": config("translation", positions="rotary", k=6, **HEADS),
    "grouped": config(
        "translation", bias=True, window=3, **{**HEADS, "h": 12, "g": 6, "cross_g": 12}
    ),
    "gated": config("language", gated=True, activation="silu", k=8, v=3, **HEADS),
}
every_family = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)


def logits(cfg: ModelConfig, weights: dict[str, Tensor]) -> Tensor:
    made = make_model(cfg).double().eval()
    made.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    text = [torch.randint(37, (2, n), generator=generator) for n in (11, 13)]
    return made(*text[: 2 if cfg.encoder_layers else 1]).detach()


def weights_of(cfg: ModelConfig) -> dict[str, Tensor]:
    return model(cfg).state_dict()


def rotation(size: int, *, is_rotary: bool = False) -> Tensor:
    X, Y = random(2, size, 3 * size)
    return rotation_onto(X, Y, is_rotary=is_rotary)


@every_family
@pytest.mark.parametrize("groups", [1, 2])
def test_permuting_and_rotating_heads_keeps_the_function(cfg, groups):
    weights, encoder = weights_of(cfg), bool(cfg.encoder_layers)
    aligned = align_weights(cfg, weights, groups, encoder=encoder)
    changed = {name for name, W in weights.items() if not torch.equal(W, aligned[name])}
    assert all(".P_" in name for name in changed)
    assert {name.rpartition(".P_")[2] for name in changed} >= {f"{one}.weight" for one in "qkvo"}
    assert_close(logits(cfg, aligned), logits(cfg, weights), rtol=0.0, atol=1e-9)


@every_family
def test_as_many_write_heads_as_before_change_nothing(cfg):
    weights = weights_of(cfg)
    for method in METHODS:
        after, converted = convert_weights(
            cfg, weights, cfg.h, method, encoder=cfg.task != "language"
        )
        assert after == cfg
        assert all(torch.equal(W, weights[name]) for name, W in converted.items())


def repeated(cfg: ModelConfig, order: list[int]) -> dict[str, Tensor]:
    """Weights of a multi-head model that is a rotated grouped one; head i belongs to order[i].

    The read-heads keep their function, whatever rotation the keys and values of a head have.
    """
    weights, (h, k, v) = weights_of(cfg), (cfg.h, cfg.k, cfg.v)
    for name in {name.rpartition(".P_")[0] for name in weights if ".P_k" in name}:
        is_rotary = cfg.positions == "rotary" and not name.endswith("cross")
        for one, size in (("k", k), ("v", v)):
            W = weights[f"{name}.P_{one}.weight"].view(h, size, -1)
            B = weights[f"{name}.P_{one}.bias"].view(h, size, 1) if cfg.bias else W[..., :0]
            for head, group in enumerate(order):
                R = rotation(size, is_rotary=is_rotary and one == "k")
                W[head], B[head] = R @ W[order.index(group)], R @ B[order.index(group)]
    return weights


@pytest.mark.parametrize("name", ["plain", "post-norm", "rotary", "rotary, cross", "gated"])
def test_heads_that_are_rotations_of_each_other_are_found_and_lose_nothing(name):
    cfg = FAMILIES[name]
    order = [0, 1, 2, 3, 1, 0, 3, 2] if cfg.h == 8 else [0, 1, 1, 0]
    groups = len(set(order))
    weights, options = repeated(cfg, order), {"encoder": bool(cfg.encoder_layers)}
    expected = logits(cfg, weights)
    for method in ("aligned", "low-rank"):
        after, converted = convert_weights(cfg, weights, groups, method, **options)
        assert_close(logits(after, converted), expected, rtol=0.0, atol=1e-7)
    _, mean = convert_weights(cfg, weights, groups, "mean", **options)
    assert (logits(after, mean) - expected).abs().max() > 1e-3


def test_mean_and_first_by_hand():
    cfg = config("language", d=2, h=4, g=4, k=1, v=1, decoder_layers=1, bias=True)
    weights, name = weights_of(cfg), "decoder.layers.0.attention"
    weights[f"{name}.P_k.weight"] = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]).double()
    weights[f"{name}.P_v.bias"] = torch.tensor([1.0, 2, 3, 4]).double()
    for groups, method, K, bias in (
        (2, "mean", [[2.0, 3], [6, 7]], [1.5, 3.5]),
        (2, "first", [[1.0, 2], [5, 6]], [1.0, 3.0]),
        (1, "mean", [[4.0, 5]], [2.5]),
        (1, "first", [[1.0, 2]], [1.0]),
    ):
        after, found = convert_weights(cfg, weights, groups, method)
        assert (after.g, after.f) == (groups, cfg.f)
        assert found[f"{name}.P_k.weight"].tolist() == K
        assert found[f"{name}.P_v.bias"].tolist() == bias
        for part in "qo":
            assert torch.equal(found[f"{name}.P_{part}.weight"], weights[f"{name}.P_{part}.weight"])


def test_two_heads_of_one_element_are_aligned_by_their_sign():
    cfg = config("language", d=2, h=2, g=2, k=1, v=1, decoder_layers=1)
    weights, name = weights_of(cfg), "decoder.layers.0.attention"
    weights[f"{name}.P_k.weight"] = torch.tensor([[1.0, 2], [-3, -2]]).double()
    weights[f"{name}.P_q.weight"] = torch.tensor([[1.0, 1], [5, 7]]).double()
    _, found = convert_weights(cfg, weights, 1)
    assert_close(found[f"{name}.P_k.weight"], torch.tensor([[2.0, 2]]).double())
    assert_close(found[f"{name}.P_q.weight"], torch.tensor([[1.0, 1], [-5, -7]]).double())


def test_low_rank_loses_least_of_the_products_of_queries_and_keys():
    cfg = config("language", h=4, g=4, decoder_layers=1)
    weights, name, losses = weights_of(cfg), "decoder.layers.0.attention", {}
    aligned = align_weights(cfg, weights, 1)

    def products(weights, one, other, heads) -> Tensor:
        A = weights[f"{name}.P_{one}.weight"]
        A = A if one == "q" else A.T
        B = weights[f"{name}.P_{other}.weight"]
        A, B = A.reshape(4, -1, cfg.d), B.reshape(heads, -1, cfg.d)
        return A.mT @ B

    for one, other, size in (("q", "k", cfg.k), ("o", "v", cfg.v)):
        whole = products(aligned, one, other, 4)
        for method in METHODS:
            _, found = convert_weights(cfg, aligned, 1, method)
            losses[method] = float((products(found, one, other, 1) - whole).square().sum())
        best = torch.linalg.svdvals(whole.flatten(0, 1))[size:].square().sum()
        assert losses["low-rank"] == pytest.approx(float(best))
        assert losses["low-rank"] < losses["aligned"] <= losses["mean"] + 1e-9


def test_heads_of_zeros_and_heads_wider_than_the_model_are_converted():
    cfg = config("language", d=2, h=4, g=4, k=5, v=3, decoder_layers=1, bias=True)
    zeros = {name: torch.zeros_like(W) for name, W in weights_of(cfg).items()}
    for weights, method in product((zeros, weights_of(cfg)), METHODS):
        after, found = convert_weights(cfg, weights, 2, method)
        assert logits(after, found).isfinite().all()


@pytest.mark.parametrize("can_sort", [True, False])
def test_heads_stay_in_their_place_if_positions_belong_to_them(can_sort):
    cfg = FAMILIES["plain"]
    weights = repeated(cfg, [0, 1, 2, 3, 1, 0, 3, 2])
    before = Heads.read(weights, "decoder.layers.1.attention", cfg.decoder_attention)
    after = before.align(4, is_rotary=False, can_sort=can_sort)
    sizes = [heads.Q.square().sum(dim=(1, 2, 3)) for heads in (before, after)]
    assert torch.allclose(*sizes) == (not can_sort)


def test_groups_are_those_of_an_exhaustive_search_up_to_one_exchange():
    points = random(6, 2)
    distances = torch.cdist(points, points).square().tolist()

    def total(groups):
        return sum(distances[i][j] for group in groups for i in group for j in group)

    found = balanced_groups(distances, 2)
    assert sorted(head for group in found for head in group) == [*range(6)]
    best = min(total([list(p[:3]), list(p[3:])]) for p in permutations(range(6)))
    exchanged = [
        total([sorted({*found[0]} - {i} | {j}), sorted({*found[1]} - {j} | {i})])
        for i in found[0]
        for j in found[1]
    ]
    assert best <= total(found) + 1e-9
    assert total(found) <= min(exchanged) + 1e-9
    blocks = [[0.0 if i % 3 == j % 3 else 1.0 for j in range(9)] for i in range(9)]
    assert balanced_groups(blocks, 3) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize("name", ["plain", "biases", "gated"])
def test_widening_keeps_the_parameters_and_the_function(name):
    cfg = FAMILIES[name]
    weights = weights_of(cfg)
    after, narrow = convert_weights(cfg, weights, 2)
    wide, widened = convert_weights(cfg, weights, 2, widen=True)
    before = sum(cost.parameters(cfg).values())
    column = before - sum(cost.parameters(replace(cfg, f=cfg.f - 1)).values())
    assert abs(sum(cost.parameters(wide).values()) - before) <= column / 2
    assert wide.f > after.f == cfg.f
    assert_close(logits(wide, widened), logits(after, narrow))
    new = widened["decoder.layers.0.feed_forward.widen.weight"][cfg.f :]
    assert new.std() == pytest.approx(cfg.d**-0.5, rel=0.2)


def test_each_kind_of_attention_has_its_own_number_of_write_heads():
    cfg = replace(FAMILIES["plain"], g=4, cross_g=2, encoder_g=8)
    weights = weights_of(cfg)
    for groups, encoder, expected in (
        (2, False, (2, None, 8)),
        (1, True, (1, None, None)),
        (4, True, (4, 2, None)),
    ):
        after, found = convert_weights(cfg, weights, groups, encoder=encoder)
        assert (after.g, after.cross_g, after.encoder_g) == expected
        assert logits(after, found).isfinite().all()


@pytest.fixture
def run(tmp_path):
    made = model(FAMILIES["biases"], dtype=torch.float32)
    (tmp_path / "bpe.model").write_bytes(b"\x00tokens")
    save_run(tmp_path / "run", made, tokenizer=tmp_path / "bpe.model")
    return tmp_path / "run"


def test_a_run_keeps_its_dtype_and_its_tokenizer(run, tmp_path):
    half = load_run(run, dtype=torch.bfloat16).model
    save_run(tmp_path / "half", half, tokenizer=run / "tokenizer.model")
    for source, dtype in ((run, torch.float32), (tmp_path / "half", torch.bfloat16)):
        done = convert(source, tmp_path / "new", write_heads=2, overwrite=dtype != torch.float32)
        found = load_run(tmp_path / "new")
        assert found.model.dtype == dtype
        assert found.model.config == done.after == replace(done.before, g=2, encoder_g=8)
        assert (found.tokenizer / "tokenizer.model").read_bytes() == b"\x00tokens"


def test_the_command_prints_what_changed_or_one_sentence(run, tmp_path, writehead, refused):
    output = tmp_path / "new"
    command = ("convert", run, output, "--write-heads")
    code, out, _ = writehead(*command, 1, "--widen", "--method=mean", "--encoder", "--chip=l4")
    assert code == 0
    rows = {line[:40].strip(): line[40:].split()[-2:] for line in out.splitlines()[1:]}
    found, cfg = load_run(output).model.config, FAMILIES["biases"]
    assert (found.g, found.encoder_g, found.cross_g) == (1, None, None)
    assert rows["d_ff"] == [str(cfg.f), str(found.f)]
    assert rows["parameters"][1] == f"{sum(cost.parameters(found).values()):,}"
    assert rows["K and V per target token"] == ["384B", "48B"]  # 2 layers × (5 + 7) × 2 bytes
    assert "l4" in out
    for options, words in (
        ((1,), "exists; choose another folder, or pass --force"),
        ((5, "--force"), "must divide the 8 write-heads"),
        ((1, "--force", "--method=average"), "unknown method 'average'"),
        ((1, "--force", "--chip=h2000"), "did you mean 'h200'?"),
    ):
        assert words in refused(*command, *options)
    assert load_run(output).model.config == found
    code, out, err = writehead(*command, 2, "--force")
    assert (code, load_run(output).model.config.g) == (0, 2), err


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(run, tmp_path):
    quantize_run(run, tmp_path / "quantized")
    convert(run, one := tmp_path / "one", write_heads=1)
    for source, output, options, error, words in (
        (run, "new", {"write_heads": 3}, ConfigError, "must divide the 8 write-heads"),
        (run, "new", {"write_heads": 8}, ConfigError, "8 write-heads; choose fewer"),
        (one, "new", {"write_heads": 1}, ConfigError, "already has 1 write-head, the minimum"),
        (run, "new", {"write_heads": 0}, ConfigError, "positive integer"),
        (run, "new", {"write_heads": True}, ConfigError, "positive integer"),
        (run, "new", {"write_heads": 1, "method": "meen"}, ConfigError, "did you mean 'mean'"),
        (run, "run", {"write_heads": 1}, RunError, "exists"),
        (run, "run", {"write_heads": 1, "overwrite": True}, RunError, "the model itself"),
        (tmp_path / "quantized", "new", {"write_heads": 1}, RunError, "is quantized"),
        (tmp_path / "none", "new", {"write_heads": 1}, RunError, "there is no run"),
    ):
        with pytest.raises(error, match=words):
            convert(source, tmp_path / output, **options)
    with pytest.raises(ConfigError, match="no encoder"):
        convert_weights(FAMILIES["gated"], weights_of(FAMILIES["gated"]), 1, encoder=True)
    assert not (tmp_path / "new").exists()
