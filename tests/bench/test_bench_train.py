import json
import sys

import pytest
import torch

from trainings import CONFIG, MODEL, SETTINGS, pair_dataset
from writehead import __version__, cost
from writehead.bench.train import bench_train
from writehead.cli import main
from writehead.data.batches import PackedBatches
from writehead.data.dataset import Dataset
from writehead.errors import ConfigError
from writehead.training.replay import WARM


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


def bench(monkeypatch, *arguments) -> int:
    command = ["writehead", "bench", "train", "--preset=tiny/multi-query", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", [*command, *SETTINGS, *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_result_says_what_made_it_and_adds_up(dataset, tmp_path, monkeypatch, capsys):
    output = tmp_path / "results" / "train.json"
    options = ("--dataset", dataset, "--steps=7", "--warmup=1", "--output", output)
    assert bench(monkeypatch, *options) == 0
    assert "µs a token" in capsys.readouterr().out
    result = json.loads(output.read_text())
    facts = result["environment"]
    assert facts["hardware"]["device"]
    assert facts["hardware"]["threads"] == 1
    assert facts["versions"]["writehead"] == __version__
    assert facts["commit"] is None or len(facts["commit"].rstrip("+")) == 40
    assert facts["command"].startswith("writehead bench train --preset=tiny/multi-query")
    assert result["model"]["d"] == MODEL.d
    assert result["train"]["rows"] == CONFIG.rows
    positions = CONFIG.rows * CONFIG.target_length
    assert result["us_per_token"] == pytest.approx(result["step_ms"] * 1e3 / positions)
    low, high = result["step_ms_spread"]
    assert low <= result["step_ms"] <= high
    floor = result["operations"] / result["matrix_rate"]
    assert result["utilisation"] == pytest.approx(floor / (result["step_ms"] / 1e3))
    assert result["floor_us_per_token"] == pytest.approx(floor / positions * 1e6)


@pytest.mark.parametrize(("changes", "rows"), [([], 8), (["--set=train.accumulate=16"], 16)])
def test_on_a_cpu_less_is_timed_unless_it_is_asked_for(
    dataset, tmp_path, monkeypatch, changes, rows
):
    output, own = tmp_path / "train.json", [one for one in SETTINGS if "train.rows" not in one]
    monkeypatch.setitem(globals(), "SETTINGS", own)
    assert bench(monkeypatch, "--dataset", dataset, "--output", output, *changes) == 0
    result = json.loads(output.read_text())
    assert (result["train"]["rows"], result["steps"], result["warmup"]) == (rows, 5, 2)
    low, high = result["step_ms_spread"]
    assert low < high  # of single steps, since nothing waits in line


def test_operations_and_labels_are_those_of_the_batches_timed(dataset, tmp_path, monkeypatch):
    output = tmp_path / "train.json"
    bench(monkeypatch, "--dataset", dataset, "--steps=3", "--warmup=2", "--output", output)
    result = json.loads(output.read_text())
    split = Dataset.open(dataset).split("train")
    batches = PackedBatches(split, "translation", CONFIG.rows, 48, 48, seed=CONFIG.seed)
    timed = [next(batches) for _ in range(5)][2:]
    assert result["fill"] == pytest.approx(sum(b.tokens for b in timed) / 3 / (4 * 48))
    setting = cost.Setting(CONFIG.rows, 48, 48)
    counts = [cost.training_step(MODEL, setting, b.visible_pairs()).operations for b in timed]
    assert result["operations"] == pytest.approx(sum(counts) / 3)


@pytest.mark.parametrize("warmup", [0, WARM, WARM + 1])
def test_on_a_gpu_the_capture_of_a_graph_is_not_timed(warmup):
    device = torch.device("cuda")
    with pytest.raises(ConfigError, match="ask for 5 or more"):
        bench_train("x", MODEL, CONFIG, iter([]), device, steps=1, warmup=warmup, tell=print)


def test_an_output_is_checked_before_steps_are_taken(dataset, tmp_path, monkeypatch, capsys):
    def timed(*given: object, **options: object) -> None:
        pytest.fail("steps were timed first")

    monkeypatch.setattr("writehead.bench.train.bench_preset", timed)
    assert bench(monkeypatch, "--output=/dev/null/x.json") == 2
    assert "/dev/null is no folder" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "mine.json").write_text("mine")
    assert bench(monkeypatch, "--output", tmp_path / "mine.json") == 2
    assert "mine.json exists; choose another place, or pass --force" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == "mine"


def test_an_interruption_says_what_is_left(dataset, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("writehead.training.step.Stepper.update", interrupted)
    path = tmp_path / "train.json"
    assert bench(monkeypatch, "--dataset", dataset, "--output", path) == 130
    err = capsys.readouterr().err
    assert "tiny/multi-query: step 1 of 2 to warm up" in err
    assert err.endswith(f"interrupted; there is no result yet, and {path} was not made\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps=0"], "0 steps cannot be timed"),
        (["--warmup=-1"], "a warm-up of -1 steps cannot be"),
        (["--preset=tiny/multi-quary"], "did you mean"),
        (["--set=model.vocabulary=300"], "choose one that fits"),
    ],
)
def test_what_cannot_be_timed_is_said(dataset, monkeypatch, capsys, arguments, words):
    given = ["--dataset", dataset, "--steps=1", "--warmup=0", *arguments]
    assert bench(monkeypatch, *given) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
