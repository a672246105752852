"""What is timed as ours on a GPU, with kernels interpreted where there is none."""

import pytest
import torch

from helpers import config, model
from writehead.bench import context
from writehead.bench.context import Context
from writehead.bench.decode import Place, graph_search
from writehead.bench.peers import plain_decode, random_source, search_config
from writehead.cost import CHIPS, Setting
from writehead.decoding import beam_search
from writehead.kernels import choose

graphs = pytest.importorskip("writehead.decoding.graphs", reason="Triton is not installed")
captured = pytest.importorskip("writehead.decoding.captured", reason="Triton is not installed")
pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # in the kernels minus infinity is a number like others
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"k": 16, "v": 32, "d": 21, "h": 4, "decoder_layers": 1}


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """One entry for each step that a captured graph takes, in graphs of no more rows than asked."""
    taken, step = [], captured.Captured.step

    def noted(self):
        taken.append(1)
        step(self)

    monkeypatch.setattr(captured.Captured, "step", noted)
    monkeypatch.setattr(graphs, "_round_rows", lambda rows: rows)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(choose, "PART", 64)
    return taken


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("make", [graph_search, plain_decode])
def test_a_timed_decoding_takes_all_steps_and_reads_the_hypotheses_back(steps, make, beam):
    made = model(config("translation", encoder_layers=1, **SIZES), dtype=torch.float32).to(DEVICE)
    setting = Setting(batch=2, source=5, target=4, beam=beam)
    torch.manual_seed(1)
    decode = make(made, setting, padded=False)
    torch.manual_seed(1)
    state = made.start(random_source(made, setting), setting.target, beam=beam)
    expected = beam_search(made.step, state, search_config(setting), end=made.config.end)
    for is_encoded_anew in (True, False, True):  # a decoding leaves nothing behind for the next
        steps.clear()
        if is_encoded_anew:
            decode.start()
        found = decode.run()
        assert len(steps) == (setting.target if make is graph_search else 0)
        assert [one.tokens for [one] in found] == [one.tokens for [one] in expected]


def test_steps_behind_a_context_are_read_back_too(steps, monkeypatch):
    made = model(config("language", target_positions=12, **SIZES), dtype=torch.float32).to(DEVICE)
    place = Place(CHIPS["h200"], DEVICE, torch.float32, 1, False, lambda text: None)
    read, run = [], graphs.GraphDecoder.run

    def noted(*given):
        read.append(run(*given))
        return read[-1]

    monkeypatch.setattr(graphs.GraphDecoder, "run", noted)
    found = context._ours(made, Context(batch=2, length=12, steps=3), place, 1.0)
    assert len(found["step_ms"]["repeats"]) == 1
    assert len(steps) == 3 * len(read) == 3 * 2  # a warm-up and a repeat
    assert [len(one.tokens) for [one] in read[0]] == [3, 3]
    assert [one.tokens for [one] in read[0]] == [one.tokens for [one] in read[1]]
