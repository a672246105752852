"""Quantized weights, against bits written out as text and a search for the nearest level."""

import itertools

import pytest
import torch

import helpers
from writehead.config import QuantizationConfig
from writehead.errors import RunError
from writehead.model import load_run, make_model, quantize_run, runs, save_run
from writehead.model.quantization import dequantize, pack, quantize, unpack

BITS = (8, 6, 5, 4)
FOUR = QuantizationConfig(bits=4, group=8)


@pytest.fixture
def small(run):
    quantize_run(run, run.parent / "small", FOUR)
    return run.parent / "small"


@pytest.mark.parametrize(("bits", "columns"), [*itertools.product(range(2, 9), (1, 8, 13))])
def test_packing_equals_a_string_of_bits(bits, columns):
    def slow_pack(row: list[int]) -> list[int]:
        text = "".join(f"{code:0{bits}b}"[::-1] for code in row)
        text += "0" * (-len(text) % 8)
        return [int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8)]

    codes = torch.randint(2**bits, (5, columns), dtype=torch.uint8)
    codes[0], codes[1] = 2**bits - 1, 0
    packed = pack(codes, bits)
    assert packed.tolist() == [slow_pack(row) for row in codes.tolist()]
    assert torch.equal(unpack(packed, bits, columns), codes)


@pytest.mark.parametrize(("bits", "group"), [*itertools.product(BITS, (None, 5, 8, 10**9))])
def test_each_weight_is_rounded_to_the_nearest_level(bits, group):
    config = QuantizationConfig(bits=bits, group=group)
    W = torch.randn(7, 13) * torch.logspace(-3, 2, 7).unsqueeze(1)
    codes, scales = quantize(W, config)
    found = dequantize(codes, scales, config)
    most = 2 ** (bits - 1) - 1
    for i, j in itertools.product(range(7), range(13)):
        scale = scales[i, 0 if group is None else j // group].item()
        levels = [scale * integer for integer in range(-most, most + 1)]
        nearest = min(abs(level - W[i, j].item()) for level in levels)
        assert abs(found[i, j].item() - W[i, j].item()) == pytest.approx(nearest, abs=1e-4 * scale)


def test_the_chosen_scales_lose_less_than_those_of_the_largest_weight():
    W = torch.randn(41, 96)
    G, found = W.reshape(41, -1, 8), dequantize(*quantize(W, FOUR), FOUR)
    scales = G.abs().amax(2, keepdim=True) / 7
    plain = ((G / scales).round() * scales).reshape(W.shape)
    assert (found - W).square().sum() < 0.95 * (plain - W).square().sum()
    for size in (0.0, 1e-9, 65504.0):
        W = torch.full((3, 9), size)
        assert torch.allclose(dequantize(*quantize(W, FOUR), FOUR), W, rtol=0.01, atol=1e-8)


@pytest.mark.parametrize("task", ["translation", "language"])
@pytest.mark.parametrize(("bits", "close"), [(8, 0.02), (6, 0.08), (5, 0.16), (4, 0.32)])
def test_a_quantized_model_is_close_to_the_original(tmp_path, task, bits, close):
    made = make_model(helpers.config(task)).eval()
    save_run(tmp_path / "run", made)
    quantize_run(tmp_path / "run", tmp_path / "small", QuantizationConfig.of(bits))
    small = load_run(tmp_path / "small").model
    assert (small.config, small.dtype) == (made.config, torch.float32)
    inputs = [helpers.tokens(3, 11)] * (2 if task == "translation" else 1)
    whole, found = made(*inputs), small(*inputs)
    assert 0 < (found - whole).square().mean().sqrt() / whole.std() < close


@pytest.mark.parametrize("config", [QuantizationConfig.of(bits) for bits in BITS], ids=str)
def test_a_quantized_run_is_as_small_as_its_bits(tmp_path, config):
    made = make_model(helpers.config("translation", d=128, f=256, vocab_size=700))
    save_run(tmp_path / "run", made)
    done = quantize_run(tmp_path / "run", tmp_path / "small", config)
    matrices = [P for P in made.parameters() if P.dim() == 2]
    weights = sum(P.numel() for P in matrices)
    scales = sum(P.shape[0] * -(-P.shape[1] // (config.group or P.shape[1])) for P in matrices)
    exact = weights * config.bits / 8 + scales * 2
    assert exact <= (tmp_path / "small" / runs.WEIGHTS).stat().st_size <= 1.2 * exact
    assert exact <= done.bytes_after < done.bytes_before
    W, found = (
        load_run(tmp_path / one).model.state_dict()[done.matrix] for one in ("run", "small")
    )
    assert done.error == pytest.approx(float((found - W).norm() / W.norm()), rel=1e-4)


def test_a_quantized_run_is_complete_and_can_be_saved_as_a_plain_one(run, small):
    assert {path.name for path in small.iterdir()} == {path.name for path in run.iterdir()}
    loaded = load_run(small)
    assert loaded.tokenizer.read_bytes() == b"\x00tokens"
    save_run(small.parent / "plain", loaded.model)
    assert runs.read_quantization(small) == FOUR
    assert runs.read_quantization(small.parent / "plain") is None


def test_nothing_is_overwritten_and_nothing_is_left(run, small):
    with pytest.raises(RunError, match="already has 4 bits"):
        quantize_run(small, small.parent / "smaller")
    with pytest.raises(RunError, match="exists"):
        quantize_run(run, small)
    with pytest.raises(RunError, match="is the run to quantize"):
        quantize_run(run, run, overwrite=True)
    assert sorted(path.name for path in run.parent.iterdir()) == ["run", "small"]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e20])
def test_a_weight_beyond_float16_is_an_error(run, value):
    helpers.edit_weights(run, lambda weights: weights["tokens.weight"][3].fill_(value))
    with pytest.raises(RunError, match=r"'tokens\.weight' has a weight beyond"):
        quantize_run(run, run.parent / "small")
    assert [path.name for path in run.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("integers", lambda T: T[:0], "is not stored in 4 bits"),
        ("scales", lambda T: T[:-1].clone(), "is not stored in 4 bits"),
        ("scales", lambda T: T.float(), "is not stored in 4 bits"),
        ("integers", lambda T: T.fill_(0xF0), "invalid code or scale"),
        ("scales", lambda T: T.fill_(torch.nan), "invalid code or scale"),
        ("scales", lambda T: T.fill_(0.0), "invalid code or scale"),
    ],
)
def test_damage_to_a_matrix_is_an_error(small, name, change, words):
    name = f"tokens.weight.{name}"
    helpers.edit_weights(small, lambda weights: weights.update({name: change(weights[name])}))
    with pytest.raises(RunError, match=words):
        load_run(small)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"bits": 7, "group": 8}, "bits=7 is not supported; choose 8, 6, 5 or 4"),
        ({"bits": 4, "grup": 8}, "did you mean 'group'"),
        ({"bits": 4, "group": 4}, "does not match its config: .* is not stored in"),
        (7, "a quantization config must be a JSON object"),
        (None, "does not match its config"),
    ],
)
def test_an_invalid_quantization_config_is_an_error(small, value, words):
    helpers.edit_config(small, lambda data: data.update(quantization=value))
    with pytest.raises(RunError, match=words):
        load_run(small)


def test_default_groups_are_rows_for_8_bits_and_32_columns_below():
    of = QuantizationConfig.of
    assert [of(8).group, of(5).group, of(4, 0).group, of(4, 48).group] == [None, 32, None, 48]
    assert of(8) == QuantizationConfig()
