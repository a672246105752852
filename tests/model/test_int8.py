"""Models with int8 weights: close to the original, independent of the batch, permanent."""

import pytest
import torch
from test_models import VARIANTS, forward, start, step_through

from helpers import config, model, tokens
from writehead.config import DecodeConfig
from writehead.engine import beam_search
from writehead.errors import BackendError, ConfigError
from writehead.ops.cpu_weights import why_not_int8
from writehead.runs import save_run

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or why_not_int8(torch.zeros(1)) is not None, reason="needs fbgemm"
)
F32 = torch.float32
b, m, n = 3, 11, 9
SIZES = {"d": 48, "f": 96}
every_task = pytest.mark.parametrize("task", ["translation", "language"])


@every_task
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_int8_weights_change_the_logits_little_and_steps_equal_forward(variant, task):
    made = model(config(task, **SIZES | variant), dtype=F32)
    source, fed = tokens(b, m), tokens(b, n)
    with torch.no_grad():
        exact = forward(made, source, fed)
        logits = forward(made.pack(int8=True), source, fed)
    assert made.is_int8
    # the error is large because the matrices are small and have large random weights
    assert (logits - exact).norm() < 0.4 * exact.norm()
    steps = step_through(made, fed, start(made, source, fed, n))
    # a sum that is rounded differently may be quantized differently, by one level
    assert (steps - logits).norm() < 0.05 * logits.norm()


# heads of ordinary depths; PyTorch has other kernels for very small products
LONG = {"d": 48, "f": 96, "k": 16, "v": 16, "target_positions": 100}
LONG_SOURCE = {"source_positions": 60}


@every_task
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"g": 6},
        {"g": 2, "v": 32},
        {"h": 1, "k": 64, "v": 64},
        {"window": 10},
        {"g": 2, "window": 16, "positions": "rotary"},
        {"g": 6, "positions": "relative"},
        {"norm": "layer", "bias": True, "norm_place": "post"},
    ],
    ids=str,
)
def test_a_sequence_has_the_same_logits_bit_for_bit_in_any_batch(variant, task):
    sizes = LONG | (LONG_SOURCE if task == "translation" else {}) | variant
    made = model(config(task, **sizes), dtype=F32).pack(int8=True)
    counts = torch.tensor([2, 33, 7, 16, 40, 17, 1, 2])
    given, fed = tokens(len(counts), 40), tokens(len(counts), 45)
    for i, count in enumerate(counts):
        given[i, count:] = made.config.pad
    name = "source_lengths" if task == "translation" else "prompt_lengths"
    together = step_through(made, fed, made.start(given, 90, **{name: counts}))
    for first, last in ((0, 1), (1, 2), (2, 3), (4, 5), (5, 8), (6, 7)):
        own, longest = slice(first, last), int(counts[first:last].max())
        lengths = {} if last == first + 1 else {name: counts[own]}
        alone = step_through(made, fed[own], made.start(given[own, :longest], 90, **lengths))
        assert torch.equal(alone, together[own]), (first, last)


@every_task
def test_a_beam_search_has_the_same_scores_in_any_batch(task):
    made = model(config(task, **LONG, g=2), dtype=F32).pack(int8=True)
    prompts = tokens(5, 4)
    options = DecodeConfig(beam=3, max_length=40)
    together = beam_search(made.step, made.start(prompts, 50, beam=3), options, eos=made.config.eos)
    for i, hypotheses in enumerate(together):
        state = made.start(prompts[i : i + 1], 50, beam=3)
        [alone] = beam_search(made.step, state, options, eos=made.config.eos)
        assert alone == hypotheses


def test_int8_weights_replace_the_original_ones_permanently(tmp_path):
    made = model(config("translation", **SIZES, source_vocab_size=41, tied=False), dtype=F32)
    floats = sum(W.nbytes for W in made.parameters())
    assert made.pack(int8=True) is made.pack(int8=True)
    kept = sum(W.nbytes for W in made.parameters() if not W.is_meta)
    assert kept < 0.2 * floats  # norms and positions
    assert (made.device, made.dtype) == (torch.device("cpu"), torch.float32)
    source, fed = tokens(2, 5, vocab_size=37), tokens(2, 4)
    with torch.no_grad():
        logits = made(source, fed)
        assert torch.equal(made.pack()(source, fed), logits)
        with torch.autocast("cpu", torch.bfloat16):
            assert (made(source, fed).float() - logits).norm() < 0.1 * logits.norm()
    changes = (made.train, made.double, lambda: made.load_state_dict({}), made.state_dict)
    saves = lambda: torch.save(made, tmp_path / "model"), lambda: save_run(tmp_path / "run", made)
    for change in (*changes, *saves):
        with pytest.raises(ConfigError, match="quantize='none'"):
            change()
    assert not (tmp_path / "run").exists()


def test_other_dtypes_and_devices_are_refused():
    for made in (model(config()), model(config(), dtype=torch.bfloat16)):
        with pytest.raises(BackendError, match="float32 weights on a CPU"):
            made.pack(int8=True)
        assert made.packed_output is None
