import pytest

from trainings import CONFIG, MODEL, SETTINGS, pair_dataset
from writehead import __version__, cost
from writehead.data.batches import PackedBatches
from writehead.data.dataset import Dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


def test_a_result_says_what_made_it_and_adds_up(bench, dataset):
    options = ("--device=cpu", *SETTINGS, "--dataset", dataset, "--steps=3")
    result = bench("train", "--preset=tiny/multi-query", *options)
    result, facts = result["rows"][0] | result, result["environment"]
    assert facts["versions"]["writehead"] == __version__
    assert facts["commit"] is None or len(facts["commit"].rstrip("+")) == 40
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
