"""Costs against brute force: the same things counted from real tensors as the models run."""

import dataclasses
import itertools
import math
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from writehead import cost
from writehead.config import ModelConfig
from writehead.cost import CHIPS, Chip, Setting
from writehead.errors import ConfigError
from writehead.kernels import Visibility
from writehead.model import LanguageModel, TranslationModel, make_model
from writehead.model import attention as attention_module
from writehead.paper.presets import preset, preset_names

TRANSLATION = ModelConfig(
    task="translation",
    vocabulary=29,
    d=10,
    f=14,
    h=6,
    g=2,
    k=3,
    v=5,
    encoder_layers=2,
    decoder_layers=3,
    source_positions=16,
    target_positions=16,
    dropout=0.0,
)
LANGUAGE = ModelConfig(
    task="language",
    vocabulary=31,
    d=9,
    f=17,
    h=4,
    g=1,
    k=5,
    v=7,
    window=3,
    decoder_layers=2,
    tied=False,
    bias=True,
    norm="layer",
    dropout=0.0,
)
CONFIGS = pytest.mark.parametrize("config", [TRANSLATION, LANGUAGE], ids=["translation", "lm"])


class Recorder:
    """Bytes that a model's linear layers and attention really touch while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: list[torch.Tensor] = []
        self.linear: list[tuple[str, int, int]] = []  # name, bytes in, bytes out
        self.kv = 0
        self.queries_and_outputs = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name):
        def hook(module, inputs, output):
            self.weights += list(module.parameters())
            self.linear.append((name.rsplit(".", 1)[-1], inputs[0].nbytes, output.nbytes))

        return hook

    def attend(self, Q, K, V, *rest, **options):
        O = ATTEND(Q, K, V, *rest, **options)  # noqa: E741
        self.kv += K.nbytes + V.nbytes
        self.queries_and_outputs += Q.nbytes + O.nbytes
        return O

    def bytes_of(self, *names: str, side: int) -> int:
        return sum(entry[side] for entry in self.linear if entry[0] in names)


ATTEND = attention_module.attend
IN, OUT = 1, 2


def run_to(config: ModelConfig, setting: Setting, position: int):
    """A model and state that have fed `position` tokens."""
    model = make_model(config, backend="eager").eval()
    tokens = torch.randint(0, config.vocabulary, (setting.batch, setting.target))
    if isinstance(model, TranslationModel):
        source = torch.randint(0, config.vocabulary, (setting.batch, setting.source))
        state = model.start(source, setting.target, beam=setting.beam)
    else:
        state = model.start(tokens[:, :1], setting.target, beam=setting.beam)
    for _ in range(position):
        model.step(state.first, state)
    return model, state


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_counts_the_parameters_its_model_has(name):
    with torch.device("meta"):
        model = make_model(preset(name))
    assert sum(cost.parameters(preset(name)).values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@CONFIGS
def test_parameters_by_part_are_those_of_the_modules_with_that_name(config):
    model = make_model(config)

    def count(*keys: str) -> int:
        named = model.named_parameters()
        return sum(p.numel() for name, p in named if all(key in name for key in keys))

    parts = cost.parameters(config)
    assert parts["token embedding"] == count("tokens.")
    assert parts.get("output embedding", 0) == count("output.")
    assert parts["positions"] == count("positions.")
    assert parts.get("encoder attention", 0) == count("encoder.", ".attention.")
    assert parts["decoder self-attention"] == count("decoder.", ".attention.")
    assert parts.get("encoder-decoder attention", 0) == count("decoder.", ".cross.")
    assert parts["decoder feed-forward"] == count("decoder.", ".feed_forward.")
    assert parts["norms"] == count("norm")


@CONFIGS
@pytest.mark.parametrize("beam", [1, 3])
def test_kv_bytes_are_those_that_a_state_allocates(config, beam):
    setting = Setting(batch=2, source=7 if config.encoder_layers else 0, target=11, beam=beam)
    setting = Setting(setting.batch, setting.source, setting.target, beam, element=4)
    _, state = run_to(config, setting, 0)
    counted = cost.kv_bytes(config, setting)
    assert counted["self"] == state.cache.nbytes
    assert counted["encoder"] == sum(memory.nbytes for memory in state.memories)
    assert counted["total"] == state.nbytes


@CONFIGS
@pytest.mark.parametrize(("beam", "position"), [(1, 0), (1, 8), (3, 5)])
def test_a_decoder_step_counts_what_a_real_step_does(config, beam, position):
    setting = Setting(2, 7 if config.encoder_layers else 0, 11, beam, element=4)
    model, state = run_to(config, setting, position)
    recorder = Recorder(model)
    with (
        patch.object(attention_module, "attend", recorder.attend),
        FlopCounterMode(display=False) as flops,
    ):
        logits = model.step(state.first, state)
    work = cost.decoder_step(config, setting, position)
    assert work.operations == flops.get_total_flops()

    output = model.tokens.weight if config.tied else model.output.weight
    weights = {id(weight): weight.nbytes for weight in [*recorder.weights, output]}
    assert sum(part.weights for part in work.parts) == sum(weights.values())
    assert sum(part.kv for part in work.parts) == recorder.kv

    parts = {part.name: part.activations for part in work.parts}
    attentions = recorder.bytes_of("P_q", "P_o", side=IN) + recorder.bytes_of(
        "P_q", "P_k", "P_v", "P_o", side=OUT
    )
    assert parts["self: projections"] + parts.get("cross: projections", 0) == attentions
    mixing = parts["self: K and V"] + parts.get("cross: K and V", 0)
    assert mixing == recorder.queries_and_outputs
    both = [recorder.bytes_of("widen", "narrow", side=side) for side in (IN, OUT)]
    assert parts["feed-forward"] == sum(both)
    assert parts["output"] == setting.rows * config.d * 4 + logits.nbytes


def test_the_encoder_counts_what_start_does():
    setting = Setting(2, 7, 11, element=4)
    model = TranslationModel(TRANSLATION, backend="eager").eval()
    recorder = Recorder(model)
    with FlopCounterMode(display=False) as flops:
        model.start(torch.randint(0, 29, (2, 7)), 11)
    work = cost.encoder(TRANSLATION, setting)
    assert work.operations == flops.get_total_flops()
    weights = {id(weight): weight.nbytes for weight in recorder.weights}
    assert sum(part.weights for part in work.parts) == sum(weights.values())


@CONFIGS
def test_a_training_step_counts_forward_and_backward_over_visible_pairs(config):
    setting = Setting(2, 7 if config.encoder_layers else 0, 11, element=4)
    model = make_model(config, backend="eager")
    tokens = torch.randint(0, config.vocabulary, (2, 11))
    with FlopCounterMode(display=False) as flops:
        if isinstance(model, LanguageModel):
            logits = model(tokens)
        else:
            logits = model(torch.randint(0, config.vocabulary, (2, 7)), tokens)
        logits.sum().backward()
    # plain products compute the hidden pairs too
    hidden = 11 * 11 - cost.visible_pairs(11, config.window)
    wasted = 3 * config.decoder_layers * 2 * 2 * hidden * config.h * (config.k + config.v)
    assert cost.training_step(config, setting).operations == flops.get_total_flops() - wasted


@pytest.mark.parametrize(("n", "window"), [*itertools.product([1, 5, 9], [None, 1, 4, 9, 20])])
def test_visible_pairs_are_those_of_the_mask(n, window):
    mask = Visibility(causal=True, window=window).mask(n, n, torch.device("cpu"))
    assert cost.visible_pairs(n, window) == int(mask.sum())


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("base", [TRANSLATION, LANGUAGE], ids=["translation", "language"])
def test_a_sequence_is_the_sum_of_its_steps_part_by_part(base, window):
    config = dataclasses.replace(base, window=window)
    setting = Setting(2, 7 if base.encoder_layers else 0, 11, beam=3)
    for padded in (False, True):
        steps = [cost.decoder_step(config, setting, t, padded=padded) for t in range(11)]
        whole = cost.decoder_sequence(config, setting, padded=padded)
        for parts in zip(whole.parts, *(step.parts for step in steps), strict=True):
            for count in ("operations", "weights", "kv", "activations"):
                total, *each = (getattr(part, count) for part in parts)
                assert total == sum(each), (parts[0].name, count)
            assert {part.name for part in parts} == {parts[0].name}


def test_every_padded_step_costs_as_much_as_the_last():
    setting = Setting(2, 7, 11)
    last = cost.decoder_step(TRANSLATION, setting)
    assert cost.decoder_step(TRANSLATION, setting, 0, padded=True) == last
    assert cost.decoder_sequence(TRANSLATION, setting, padded=True).bytes == 11 * last.bytes


@pytest.mark.parametrize(
    ("row", "beam", "milliseconds"),
    [
        ("multi-query", 1, 0.52),
        ("multi-head", 1, 1.81),
        ("multi-query-local", 1, 0.45),
        ("multi-head-local", 1, 1.25),
        ("multi-query", 4, 1.79),
        ("multi-head", 4, 5.0),
    ],
)
def test_the_floor_of_the_papers_decoding_work_on_an_h200(row, beam, milliseconds):
    work = cost.decoder_step(preset(f"wmt14/{row}"), Setting(1024, 128, 128, beam))
    assert work.floor(CHIPS["h200"]) * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_the_largest_batch_fits_and_one_more_does_not():
    chip = Chip("small", memory=1e6, bandwidth=1e9, flops=1e9, source="made up")
    batch = cost.largest_batch(TRANSLATION, Setting(1, 7, 11, 2), chip)

    def needed(b: int) -> int:
        kv = cost.kv_bytes(TRANSLATION, Setting(b, 7, 11, 2))["total"]
        d, f, vocabulary = TRANSLATION.d, TRANSLATION.f, TRANSLATION.vocabulary
        own = TRANSLATION.encoder_attention
        fed, attended = d + f, own.h * own.k + own.g * (own.k + own.v) + 3 * own.h * own.v
        encoder = 7 * (d + max(fed, attended)) * 2
        step = 2 * ((2 * d + f + vocabulary) * 2 + vocabulary // 8)
        notes = 2 * 11 * (2 * 4 + 4 + 8)
        weights = 2 * sum(p.numel() for p in TranslationModel(TRANSLATION).parameters())
        return weights + kv + b * (encoder + step + notes)

    assert batch > 1
    assert needed(batch) <= chip.memory < needed(batch + 1)


def test_a_model_larger_than_the_chip_has_a_largest_batch_of_zero():
    chip = Chip("tiny", memory=1e3, bandwidth=1e9, flops=1e9, source="made up")
    assert cost.largest_batch(TRANSLATION, Setting(1, 7, 11), chip) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Setting(0, 1, 1), "batch=0 must be at least 1"),
        (lambda: Setting(1, -1, 1), "source=-1 must not be negative"),
        (lambda: cost.find_chip("h20"), "did you mean 'h200'"),
        (lambda: Chip("x", 1, 0, 1, ""), "bandwidth=0 must be above 0"),
        (lambda: Chip("x", 1, 1, math.inf, ""), "flops=inf must be above 0 and finite"),
        (lambda: Chip("x", math.inf, 1, 1, ""), "memory=inf must be above 0 and finite"),
        (lambda: cost.decoder_step(LANGUAGE, Setting(1, 0, 4), 4), "from 0 to 3"),
        (lambda: cost.decoder_step(LANGUAGE, Setting(1, 0, 4), -1), "from 0 to 3"),
    ],
)
def test_bad_questions_are_answered_with_what_to_do(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
