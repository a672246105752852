"""Costs against the tensors and operations of running models."""

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from helpers import config
from writehead import cost
from writehead.config import ModelConfig
from writehead.cost import Chip, Setting
from writehead.model import TranslationModel, make_model
from writehead.ops.visibility import Visibility

# no two sizes are equal
TRANSLATION = config("translation", g=2)
LANGUAGE = config("language", h=4, window=3, tied=False, bias=True, norm="layer")
FIELDS = {"bias": True, "norm": "layer", "norm_place": "post", "gated": True, "output_bias": True}
HEADS = {"g": 2, "encoder_g": 6, "cross_g": 1, "source_vocab_size": 41, "position_offset": 2}
MIXED = config("translation", **FIELDS, **HEADS)
ROTARY = config("language", positions="rotary", k=6)
RELATIVE = config("translation", positions="relative", relative_buckets=6, g=1)
CONFIGS = pytest.mark.parametrize(
    "cfg",
    [TRANSLATION, LANGUAGE, MIXED, ROTARY, RELATIVE],
    ids=["translation", "lm", "mixed", "rotary", "relative"],
)


class Recorder(TorchFunctionMode):
    """Bytes of weights, K and V that the products of a running model read."""

    weights = kv = 0

    def __torch_function__(self, function, types, args=(), options=None):
        if function is F.linear:
            self.weights += sum(P.nbytes for P in args[1:] if P is not None)
        elif function is F.scaled_dot_product_attention:
            self.kv += args[1].nbytes + args[2].nbytes
        elif function is torch.bmm:
            self.kv += args[1].nbytes
        elif function is torch.baddbmm:
            self.kv += args[2].nbytes
        elif function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            self.kv += args[1].nbytes
        return function(*args, **(options or {}))


def run_to(cfg: ModelConfig, setting: Setting, position: int):
    """A model and state that have fed `position` tokens."""
    model = make_model(cfg, backend="eager").eval()
    width = setting.source if isinstance(model, TranslationModel) else 1
    source = torch.randint(0, cfg.vocab_size, (setting.batch, width))
    state = model.start(source, setting.target, beam=setting.beam)
    for _ in range(position):
        model.step(state.first, state)
    return model, state


@CONFIGS
def test_parameters_by_part_are_those_of_the_modules_with_that_name(cfg):
    parts, named = cost.parameters(cfg), dict(make_model(cfg).named_parameters())
    for part, prefix, key in (
        ("token embedding", "tokens", ""),
        ("output embedding", "output.weight", ""),
        ("encoder attention", "encoder", ".attention."),
        ("decoder self-attention", "decoder", ".attention."),
        ("encoder-decoder attention", "decoder", ".cross."),
        ("decoder feed-forward", "decoder", ".feed_forward."),
    ):
        found = [P for name, P in named.items() if name.startswith(prefix) and key in name]
        assert parts.get(part, 0) == sum(P.numel() for P in found), part
    assert sum(parts.values()) == sum(P.numel() for P in named.values())


@CONFIGS
@pytest.mark.parametrize(("beam", "position"), [(1, 0), (1, 8), (3, 5)])
def test_a_decoder_step_counts_what_a_real_step_does(cfg, beam, position):
    setting = Setting(2, 7 if cfg.encoder_layers else 0, 11, beam, element=4)
    model, state = run_to(cfg, setting, position)
    allocated = {"self": state.cache.nbytes, "encoder": state.nbytes - state.cache.nbytes}
    kv = cost.kv_bytes(cfg, setting)
    assert {name: kv[name] for name in allocated} == allocated
    assert kv["total"] == state.nbytes

    with Recorder() as read, FlopCounterMode(display=False) as flops:
        model.step(state.first, state)
    parts = {part.name: part for part in cost.decoder_step(cfg, setting, position).parts}
    assert sum(part.operations for part in parts.values()) == flops.get_total_flops()
    assert sum(part.weights for part in parts.values()) == read.weights
    assert sum(part.kv for part in parts.values()) == read.kv


@pytest.mark.parametrize("cfg", [TRANSLATION, MIXED])
def test_the_encoder_counts_what_start_does(cfg):
    setting = Setting(2, 7, 11, element=4)
    model = TranslationModel(cfg, backend="eager").eval()
    with Recorder() as read, FlopCounterMode(display=False) as flops:
        model.start(torch.randint(0, 37, (2, 7)), 11)
    work = cost.encoder(cfg, setting)
    assert work.operations == flops.get_total_flops()
    assert sum(part.weights for part in work.parts) == read.weights


@CONFIGS
def test_a_training_step_counts_forward_and_backward_over_visible_pairs(cfg):
    setting = Setting(2, 7 if cfg.encoder_layers else 0, 11, element=4)
    model = make_model(cfg, backend="eager")
    inputs = [torch.randint(0, cfg.vocab_size, (2, n)) for n in (setting.source, 11) if n]
    with FlopCounterMode(display=False) as flops:
        model(*inputs).sum().backward()
    # plain products compute the hidden pairs too
    hidden = 11 * 11 - cost.visible_pairs(11, cfg.window)
    wasted = 3 * cfg.decoder_layers * 2 * 2 * hidden * cfg.h * (cfg.k + cfg.v)
    assert cost.training_step(cfg, setting).operations == flops.get_total_flops() - wasted


@pytest.mark.parametrize(("n", "window"), [*itertools.product([1, 5, 9], [None, 1, 4, 9, 20])])
def test_visible_pairs_are_those_of_the_mask(n, window):
    mask = Visibility(causal=True, window=window).mask(n, n, torch.device("cpu"))
    assert cost.visible_pairs(n, window) == int(mask.sum())


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@CONFIGS
def test_a_sequence_is_the_sum_of_its_steps_part_by_part(cfg, window):
    cfg = dataclasses.replace(cfg, window=window)
    setting = Setting(2, 7 if cfg.encoder_layers else 0, 11, beam=3)
    steps = [cost.decoder_step(cfg, setting, t) for t in range(11)]
    for padded in (False, True):
        whole = cost.decoder_sequence(cfg, setting, padded=padded)
        works = steps[-1:] * 11 if padded else steps  # a padded step costs as much as the last
        for parts in zip(whole.parts, *(step.parts for step in works), strict=True):
            for count in ("operations", "weights", "kv"):
                total, *each = (getattr(part, count) for part in parts)
                assert total == sum(each), (parts[0].name, count)


def test_the_largest_batch_fills_the_memory_and_does_not_exceed_it():
    setting = Setting(1, 7, 11, 2)  # tests/gpu/test_room_on_gpu.py counts the bytes of a GPU
    chip = Chip("small", memory=1e6, bandwidth=1e9, flops=1e9, source="made up")
    weights = 2 * sum(P.numel() for P in TranslationModel(TRANSLATION).parameters())
    batch = cost.largest_batch(TRANSLATION, setting, chip)
    cached = weights + batch * cost.kv_bytes(TRANSLATION, setting)["total"]
    assert weights < cached < chip.memory < 2 * cached
    assert cost.largest_batch(TRANSLATION, setting, dataclasses.replace(chip, memory=1e3)) == 0
