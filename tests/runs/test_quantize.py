"""Quantized weights, against bits written out as text and a search for the nearest level."""

import itertools

import pytest
import torch

import helpers
from writehead.config import QuantizationConfig
from writehead.errors import RunError
from writehead.interop.quantize import quantize_run
from writehead.model import make_model
from writehead.runs import folder, load_run, save_run
from writehead.runs.quantization import dequantize, pack, quantize, unpack

FOUR = QuantizationConfig(bits=4, group=8)


@pytest.fixture
def small(run):
    quantize_run(run, run.parent / "small", FOUR)
    return run.parent / "small"


@pytest.mark.parametrize(("bits", "columns"), [*itertools.product(range(2, 9), (1, 13))])
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


@pytest.mark.parametrize(("bits", "group"), [*itertools.product((8, 6, 5, 4), (None, 5, 8, 10**9))])
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


@pytest.mark.parametrize(("bits", "close"), [(8, 0.02), (6, 0.08), (5, 0.16), (4, 0.32)])
def test_a_quantized_run_is_as_small_as_its_bits_and_close_to_the_original(tmp_path, bits, close):
    made = make_model(helpers.config("translation", d=128, f=256, vocab_size=700)).eval()
    save_run(tmp_path / "run", made)
    config = QuantizationConfig.of(bits)
    assert config.group == (None if bits == 8 else 32)
    done = quantize_run(tmp_path / "run", tmp_path / "small", config)
    matrices = [P for P in made.parameters() if P.dim() == 2]
    weights = sum(P.numel() for P in matrices)
    scales = sum(P.shape[0] * -(-P.shape[1] // (config.group or P.shape[1])) for P in matrices)
    exact = weights * bits / 8 + scales * 2
    assert exact <= (tmp_path / "small" / folder.WEIGHTS).stat().st_size <= 1.2 * exact
    assert exact <= done.bytes_after < done.bytes_before
    small, inputs = load_run(tmp_path / "small").model, [helpers.tokens(3, 11)] * 2
    W, found = (model.state_dict()[done.matrix] for model in (made, small))
    assert done.error == pytest.approx(float((found - W).norm() / W.norm()), rel=1e-4)
    assert (small.config, small.dtype) == (made.config, torch.float32)
    whole, found = made(*inputs), small(*inputs)
    assert 0 < (found - whole).square().mean().sqrt() / whole.std() < close


def test_a_quantized_run_is_complete_and_nothing_is_overwritten(run, small):
    assert {path.name for path in small.iterdir()} == {path.name for path in run.iterdir()}
    loaded = load_run(small)
    assert (loaded.tokenizer / "tokenizer.model").read_bytes() == b"\x00tokens"
    for source, target, words in (
        (small, small.parent / "smaller", "already has 4 bits"),
        (run, small, "exists"),
    ):
        with pytest.raises(RunError, match=words):
            quantize_run(source, target)
    with pytest.raises(RunError, match="is the model itself"):
        quantize_run(run, run, overwrite=True)
    assert sorted(path.name for path in run.parent.iterdir()) == ["run", "small"]
    save_run(small.parent / "plain", loaded.model)
    assert folder.read_quantization(small) == FOUR
    assert folder.read_quantization(small.parent / "plain") is None


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
        ("scales", lambda T: T.float(), "is not stored in 4 bits"),
        ("integers", lambda T: T.fill_(0xF0), "invalid code or scale"),
        ("scales", lambda T: T.fill_(torch.nan), "invalid code or scale"),
        ("scales", lambda T: T.fill_(0.0), "invalid code or scale"),
        (None, {"bits": 7, "group": 8}, "bits=7 is not supported; choose 8, 6, 5 or 4"),
        (None, {"bits": 4, "group": 4}, "does not match its config: .* is not stored in"),
        (None, 7, "a quantization config must be a JSON object"),
        (None, None, "does not match its config"),
    ],
)
def test_damage_to_a_matrix_or_to_the_config_is_an_error(small, name, change, words):
    if name is None:
        helpers.edit_config(small, lambda data: data.update(quantization=change))
    else:
        name = f"tokens.weight.{name}"
        helpers.edit_weights(small, lambda W: W.update({name: change(W[name])}))
    with pytest.raises(RunError, match=words):
        load_run(small)
