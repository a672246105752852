"""Kill -9 at every point where a file is opened, moved, made or removed; then the same command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corpora import files, pair_inputs, pairs, write_pairs
from writehead.config import PrepareConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.errors import DataError

CONFIG = PrepareConfig(task="translation", vocabulary=330, dev=10)
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

# forks a child for each point, so that everything is imported once
DRIVER = """
import os, signal, sys
from pathlib import Path
from corpora import pair_inputs, pairs
from test_prepare_killed import CONFIG
from writehead.data.prepare import prepare

root = Path(sys.argv[1])
events = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
for point in range(200):
    folder = root / str(point)
    folder.mkdir()
    inputs = pair_inputs(folder, pairs(60))
    child = os.fork()
    if child == 0:
        left = point
        def hook(event, arguments):
            global left
            if event in events and "/.ds." in str(arguments):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
        sys.addaudithook(hook)
        prepare(folder / "ds", inputs, CONFIG, workers=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        print(point, os.WEXITSTATUS(status))
        break
"""


def test_killed_anywhere_the_same_command_makes_the_same_dataset(tmp_path):
    (tmp_path / "whole").mkdir()
    inputs = pair_inputs(tmp_path / "whole", pairs(60))
    expected = files(prepare(tmp_path / "whole" / "ds", inputs, CONFIG, workers=1).directory)
    root = tmp_path / "killed"
    root.mkdir()
    environment = ENVIRONMENT | {
        "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{Path(__file__).parent}"
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(root)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    points, status = map(int, done.stdout.split())
    assert status == 0
    assert points > 20
    complete = kept = 0
    for point in range(points):
        folder = root / str(point)
        try:
            complete += files(Dataset.open(folder / "ds").directory) == expected
        except DataError:
            assert not (folder / "ds").exists(), point
        kept += (folder / ".ds.partial" / "state.json").exists()
        inputs = pair_inputs(folder, pairs(60))
        again = prepare(folder / "ds", inputs, CONFIG, workers=1)
        assert files(again.directory) == expected, point
        assert not list(folder.glob(".*")), point
    assert 0 < complete < points
    assert 0 < kept < points


def test_a_kept_tokenizer_is_not_used_for_other_text_or_another_vocabulary(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(60))
    fresh = files(prepare(tmp_path / "fresh", inputs, CONFIG, workers=1).directory)
    other = pair_inputs_elsewhere(tmp_path)
    leave_partial(tmp_path, other)
    assert files(prepare(tmp_path / "ds", inputs, CONFIG, workers=1).directory) == fresh


def pair_inputs_elsewhere(tmp_path):
    (tmp_path / "other").mkdir()
    return pair_inputs(tmp_path / "other", pairs(60, seed=8))


def leave_partial(tmp_path, inputs):
    """An interrupted run: its tokenizer is learnt, its encoding is not done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("writehead.data.prepare._encode_splits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "ds", inputs, CONFIG, workers=1)
    assert (tmp_path / ".ds.partial" / "tokenizer.model").is_file()


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_kept_tokenizer_is_not_learnt_again(tmp_path, monkeypatch):
    inputs = pair_inputs(tmp_path, pairs(60))
    fresh = files(prepare(tmp_path / "fresh", inputs, CONFIG, workers=1).directory)
    leave_partial(tmp_path, inputs)
    monkeypatch.setattr("writehead.data.prepare.learn_tokenizer", interrupt)
    assert files(prepare(tmp_path / "ds", inputs, CONFIG, workers=1).directory) == fresh


@pytest.fixture
def command(tmp_path):
    """`writehead prepare` whose two processes have begun to answer."""
    source, target = write_pairs(tmp_path, "train", pairs(60_000, longest=6))
    arguments = ["--source", source, "--target", target, "--vocabulary", "400"]
    arguments += ["--sample", "2000", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "writehead", "prepare", tmp_path / "ds", *arguments],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background jobs ignore SIGINT, and what they start would too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    tokens = tmp_path / ".ds.partial" / "dataset" / "train.source.tokens"
    while not (tokens.exists() and tokens.stat().st_size):
        assert process.poll() is None
    yield process
    process.kill()


def test_processes_die_with_the_one_that_was_killed(command):
    command.kill()
    # the pipe ends when the last process that holds it has ended
    command.communicate(timeout=60)
    assert command.returncode == -signal.SIGKILL


def test_an_interrupt_is_one_line_that_says_how_to_go_on(command, tmp_path):
    os.killpg(command.pid, signal.SIGINT)  # as Ctrl-C does, to the workers too
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert errors.splitlines()[-1] == "interrupted; run the same command again to go on"
    assert "Traceback" not in errors
    assert not (tmp_path / "ds").exists()
    assert (tmp_path / ".ds.partial" / "state.json").is_file()
