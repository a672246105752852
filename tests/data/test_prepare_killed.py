"""`prepare` interrupted or killed with SIGKILL at any moment, and run again."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from corpora import files, pair_inputs, pairs
from processes import environment, run_python
from writehead.config import PrepareConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.errors import DataError

CONFIG = PrepareConfig(task="translation", vocab_size=330, dev=10)

# forks a child per kill point, so that everything is imported once
DRIVER = """
import sys
from pathlib import Path
from processes import killed_at
from test_prepare_killed import CONFIG, pair_inputs, pairs, prepare

root = Path(sys.argv[1])
inputs = pair_inputs(root, pairs(60))
for point in range(200):
    folder = root / str(point)
    folder.mkdir()
    code = killed_at(point, folder, lambda: prepare(folder / "ds", inputs, CONFIG, threads=1))
    if code >= 0:
        print(point, code)
        break
"""


def test_killed_at_any_file_operation_the_same_command_makes_the_same_dataset(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(60))
    expected = files(prepare(tmp_path / "ds", inputs, CONFIG, threads=1).directory)
    code, out, err = run_python(DRIVER, tmp_path, env=environment(Path(__file__).parent))
    assert code == 0, err
    points, status = map(int, out.split())
    assert (status, points > 20) == (0, True)
    complete = 0
    for point in range(points):
        folder = tmp_path / str(point)
        try:
            complete += files(Dataset.open(folder / "ds").directory) == expected
        except DataError:
            assert not (folder / "ds").exists(), point
        again = prepare(folder / "ds", inputs, CONFIG, threads=1)
        assert files(again.directory) == expected, point
        assert not list(folder.glob(".*")), point
    assert 0 < complete < points


def test_an_interrupted_attempt_leaves_its_tokenizer_for_the_same_text_and_settings(
    tmp_path, monkeypatch
):
    inputs, interrupt = pair_inputs(tmp_path, pairs(60)), Mock(side_effect=KeyboardInterrupt)
    expected = files(prepare(tmp_path / "ds", inputs, CONFIG, threads=1).directory)
    place = tmp_path / "new"
    place.mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("writehead.data.prepare._encode_split", interrupt)
        prepare(place / "ds", inputs, CONFIG, threads=1)
    assert len(list(place.iterdir())) == 1
    prepare(place / "other", inputs, replace(CONFIG, vocab_size=331), threads=1)  # trains its own
    monkeypatch.setattr("writehead.data.prepare._train", interrupt)  # must not train again
    assert files(prepare(place / "ds", inputs, CONFIG, threads=1).directory) == expected
    assert not list(place.glob(".*"))
