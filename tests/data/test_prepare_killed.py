"""`prepare` interrupted or killed with SIGKILL at any moment, and run again."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from corpora import files, pair_inputs, pairs
from writehead.config import PrepareConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.errors import DataError

CONFIG = PrepareConfig(task="translation", vocab_size=330, dev=10)
PATH = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])

# forks a child per kill point, so that everything is imported once
DRIVER = """
import os, signal, sys
from pathlib import Path
from test_prepare_killed import CONFIG, pair_inputs, pairs, prepare

root = Path(sys.argv[1])
events = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
inputs = pair_inputs(root, pairs(60))
for point in range(200):
    folder = root / str(point)
    folder.mkdir()
    child = os.fork()
    if child == 0:
        left = point
        def hook(event, arguments):
            global left
            if event in events and f"{folder}/" in str(arguments):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
        sys.addaudithook(hook)
        prepare(folder / "ds", inputs, CONFIG, threads=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        print(point, os.WEXITSTATUS(status))
        break
"""


def test_killed_at_any_file_operation_the_same_command_makes_the_same_dataset(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(60))
    expected = files(prepare(tmp_path / "ds", inputs, CONFIG, threads=1).directory)
    command, environment = [sys.executable, "-c", DRIVER, tmp_path], {"PYTHONPATH": PATH}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True)
    points, status = map(int, done.stdout.split())
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
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    inputs = pair_inputs(tmp_path, pairs(60))
    expected = files(prepare(tmp_path / "ds", inputs, CONFIG, threads=1).directory)
    place = tmp_path / "new"
    place.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("writehead.data.prepare._encode_split", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(place / "ds", inputs, CONFIG, threads=1)
    assert len(list(place.iterdir())) == 1
    prepare(place / "other", inputs, replace(CONFIG, vocab_size=331), threads=1)  # trains its own
    with monkeypatch.context() as patch:
        patch.setattr("writehead.data.prepare._train", interrupt)  # must not train again
        again = prepare(place / "ds", inputs, CONFIG, threads=1)
    assert files(again.directory) == expected
    assert not list(place.glob(".*"))
