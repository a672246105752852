import json

import pytest
import torch

from trainings import CONFIG, MODEL, SETTINGS, pair_dataset
from writehead import __version__, cost
from writehead.bench.train import TrainJob
from writehead.data.batches import PackedBatches
from writehead.data.dataset import Dataset
from writehead.errors import ConfigError
from writehead.training.step import WARMUP_STEPS

GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def bench(writehead, dataset, tmp_path):
    def run(*options, settings=SETTINGS):
        path = tmp_path / "train.json"
        command = ("bench", "train", "--preset=tiny/multi-query", "--device=cpu", *settings)
        code, _, err = writehead(*command, "--dataset", dataset, "--output", path, *options)
        result = json.loads(path.read_text()) if path.exists() else None
        return code, err, result and {**result, **result["rows"][0]}

    return run


def test_a_result_says_what_made_it_and_adds_up(bench, dataset):
    code, err, result = bench("--steps=3", "--warmup=2")
    assert code == 0, err
    facts = result["environment"]
    assert facts["versions"]["writehead"] == __version__
    assert facts["commit"] is None or len(facts["commit"].rstrip("+")) == 40
    assert facts["command"].startswith("writehead bench train --preset=tiny/multi-query")
    positions = CONFIG.rows * CONFIG.target_length
    assert result["us_per_token"] == pytest.approx(result["step_ms"] * 1e3 / positions)
    low, high = result["step_ms_spread"]
    assert low <= result["step_ms"] <= high
    floor = result["operations"] / result["matrix_rate"]
    assert result["utilisation"] == pytest.approx(floor / (result["step_ms"] / 1e3))
    assert result["floor_us_per_token"] == pytest.approx(floor / positions * 1e6)
    # operations and labels are those of the batches that were timed
    split = Dataset.open(dataset).split("train")
    batches = PackedBatches(split, CONFIG.rows, 48, 48, seed=CONFIG.seed)
    timed = [next(batches) for _ in range(5)][2:]
    assert result["fill"] == pytest.approx(sum(b.tokens for b in timed) / 3 / (4 * 48))
    setting = cost.Setting(CONFIG.rows, 48, 48)
    counts = [cost.training_step(MODEL, setting, b.visible_pairs()).operations for b in timed]
    assert result["operations"] == pytest.approx(sum(counts) / 3)


def test_on_a_gpu_the_capture_of_a_graph_is_not_timed():
    with pytest.raises(ConfigError, match="at least 5"):
        TrainJob("x", MODEL, CONFIG, GPU, steps=1, warmup=WARMUP_STEPS + 1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--steps=0", "steps=0"),
        ("--warmup=-1", "warmup=-1"),
        ("--set=model.vocab_size=300", "choose another dataset"),
    ],
)
def test_impossible_settings_are_refused(bench, option, words):
    code, err, _ = bench("--steps=1", "--warmup=0", option)
    assert code == 2
    assert words in err.replace("\n", " ")
