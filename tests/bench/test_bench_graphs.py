"""Our side of the GPU benchmarks, with interpreted kernels where there is no GPU."""

import pytest
import torch

from helpers import config, model
from writehead.bench import context
from writehead.bench.context import Context
from writehead.bench.decode import graph_search, plain_decode
from writehead.bench.peers import random_source, search_config
from writehead.cost import Setting
from writehead.decoding import beam_search
from writehead.kernels import choose

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # in the kernels minus infinity is a number like others
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}


@pytest.fixture(autouse=True)
def _small_graphs(monkeypatch):
    """Graphs of no more rows than asked for: the interpreter is slow."""
    monkeypatch.setattr(graphs, "_round_rows", lambda rows: rows)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(choose, "PART", 64)


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("make", [graph_search, plain_decode])
def test_a_timed_decoding_finds_what_beam_search_finds(make, beam):
    made = model(config("translation", encoder_layers=1, **SIZES), dtype=torch.float32).to(DEVICE)
    setting = Setting(batch=2, source=4, target=3, beam=beam)
    torch.manual_seed(1)
    decode = make(made, setting, padded=False)
    torch.manual_seed(1)
    state = made.start(random_source(made, setting), setting.target, beam=beam)
    expected = beam_search(made.step, state, search_config(setting), eos=made.config.eos)
    for is_encoded_anew in (True, False):  # a decoding leaves nothing behind for the next
        if is_encoded_anew:
            decode.start()
        assert [one.tokens for [one] in decode.run()] == [one.tokens for [one] in expected]


def test_steps_after_a_context_are_captured():
    made = model(config("language", target_positions=12, **SIZES), dtype=torch.float32).to(DEVICE)
    run = context._ours(made, Context(batch=2, length=12))
    run()
    run()
