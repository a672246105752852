"""Costs against the tensors and operations of running models."""

import dataclasses
import itertools
import math
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from helpers import config
from writehead import cost
from writehead.config import ModelConfig
from writehead.cost import Chip, Setting
from writehead.errors import ConfigError
from writehead.kernels import Visibility
from writehead.model import TranslationModel, make_model
from writehead.model import attention as attention_module
from writehead.paper.presets import preset, preset_names

# no two sizes are equal
TRANSLATION = config("translation", g=2)
LANGUAGE = config("language", h=4, window=3, tied=False, bias=True, norm="layer")
CONFIGS = pytest.mark.parametrize("cfg", [TRANSLATION, LANGUAGE], ids=["translation", "lm"])
ATTEND = attention_module.attend


class Recorder:
    """Bytes of weights, K and V that a model really reads while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.weights, self.kv = {}, 0
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "output":
                module.register_forward_hook(self.linear)

    def linear(self, module, inputs, output):
        self.weights |= {id(P): P.nbytes for P in module.parameters()}

    def attend(self, Q, K, V, *rest, **options):
        self.kv += K.nbytes + V.nbytes
        return ATTEND(Q, K, V, *rest, **options)


def run_to(cfg: ModelConfig, setting: Setting, position: int):
    """A model and state that have fed `position` tokens."""
    model = make_model(cfg, backend="eager").eval()
    width = setting.source if isinstance(model, TranslationModel) else 1
    source = torch.randint(0, cfg.vocab_size, (setting.batch, width))
    state = model.start(source, setting.target, beam=setting.beam)
    for _ in range(position):
        model.step(state.first, state)
    return model, state


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_counts_the_parameters_its_model_has(name):
    with torch.device("meta"):
        model = make_model(preset(name))
    count = sum(P.numel() for P in model.parameters())
    assert sum(cost.parameters(preset(name)).values()) == count


@CONFIGS
def test_parameters_by_part_are_those_of_the_modules_with_that_name(cfg):
    parts, named = cost.parameters(cfg), dict(make_model(cfg).named_parameters())
    for part, prefix, key in (
        ("token embedding", "tokens", ""),
        ("output embedding", "output", ""),
        ("encoder attention", "encoder", ".attention."),
        ("decoder self-attention", "decoder", ".attention."),
        ("encoder-decoder attention", "decoder", ".cross."),
        ("decoder feed-forward", "decoder", ".feed_forward."),
    ):
        found = [P for name, P in named.items() if name.startswith(prefix) and key in name]
        assert parts.get(part, 0) == sum(P.numel() for P in found), part


@CONFIGS
@pytest.mark.parametrize(("beam", "position"), [(1, 0), (1, 8), (3, 5)])
def test_a_decoder_step_counts_what_a_real_step_does(cfg, beam, position):
    setting = Setting(2, 7 if cfg.encoder_layers else 0, 11, beam, element=4)
    model, state = run_to(cfg, setting, position)
    allocated = {"self": state.cache.nbytes, "encoder": state.nbytes - state.cache.nbytes}
    kv = cost.kv_bytes(cfg, setting)
    assert {name: kv[name] for name in allocated} == allocated
    assert kv["total"] == state.nbytes

    recorder = Recorder(model)
    with (
        patch.object(attention_module, "attend", recorder.attend),
        FlopCounterMode(display=False) as flops,
    ):
        model.step(state.first, state)
    work = cost.decoder_step(cfg, setting, position)
    output = model.tokens.weight if cfg.tied else model.output.weight
    assert work.operations == flops.get_total_flops()
    weights = recorder.weights | {id(output): output.nbytes}
    assert sum(part.weights for part in work.parts) == sum(weights.values())
    assert sum(part.kv for part in work.parts) == recorder.kv


def test_the_encoder_counts_what_start_does():
    setting = Setting(2, 7, 11, element=4)
    model = TranslationModel(TRANSLATION, backend="eager").eval()
    recorder = Recorder(model)
    with FlopCounterMode(display=False) as flops:
        model.start(torch.randint(0, 37, (2, 7)), 11)
    work = cost.encoder(TRANSLATION, setting)
    assert work.operations == flops.get_total_flops()
    assert sum(part.weights for part in work.parts) == sum(recorder.weights.values())


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


def test_the_largest_batch_fits_and_one_more_does_not():
    cfg, setting = TRANSLATION, Setting(1, 7, 11, 2)
    chip = Chip("small", memory=1e6, bandwidth=1e9, flops=1e9, source="made up")
    kv = cost.kv_bytes(cfg, setting)["total"]
    attended = cfg.h * cfg.k + cfg.g * (cfg.k + cfg.v) + 3 * cfg.h * cfg.v
    encoder = 7 * (cfg.d + max(cfg.d + cfg.f, attended)) * 2
    step = 2 * ((2 * cfg.d + cfg.f + cfg.vocab_size) * 2 + cfg.vocab_size // 8)
    each = kv + encoder + step + 2 * 11 * (2 * 4 + 4 + 8)
    weights = 2 * sum(P.numel() for P in TranslationModel(cfg).parameters())
    batch = cost.largest_batch(cfg, setting, chip)
    assert batch > 1
    assert weights + batch * each <= chip.memory < weights + (batch + 1) * each
    assert cost.largest_batch(cfg, setting, dataclasses.replace(chip, memory=1e3)) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Setting(0, 1, 1), "batch=0 must be at least 1"),
        (lambda: Setting(1, -1, 1), "source=-1 must be at least 0"),
        (lambda: cost.find_chip("h20"), "did you mean 'h200'"),
        (lambda: Chip("x", 1, 1, math.inf, ""), "flops=inf must be a finite number"),
        (lambda: cost.decoder_step(LANGUAGE, Setting(1, 0, 4), 4), "from 0 to 3"),
    ],
)
def test_bad_questions_are_answered_with_what_to_do(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
