"""`prepare` interrupted or killed with SIGKILL at any moment, and run again."""

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
        prepare(folder / "ds", inputs, CONFIG, workers=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        print(point, os.WEXITSTATUS(status))
        break
"""


def test_killed_at_any_file_operation_the_same_command_makes_the_same_dataset(tmp_path):
    inputs = pair_inputs(tmp_path, pairs(60))
    expected = files(prepare(tmp_path / "ds", inputs, CONFIG, workers=1).directory)
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
        again = prepare(folder / "ds", inputs, CONFIG, workers=1)
        assert files(again.directory) == expected, point
        assert not list(folder.glob(".*")), point
    assert 0 < complete < points


# the command with two worker processes, which stops for good while it encodes
STUCK = """
import signal, sys
from writehead.cli import main
from writehead.data import prepare, sources

prepare.MIN_LINES_FOR_WORKERS, read, readings = 0, sources.TextFiles.rows, []
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it

def rows(self):
    readings.append(self)
    for number, row in enumerate(read(self)):
        if len(readings) == 2 and number == 5000:
            print("encoding", flush=True)
            signal.pause()
        yield row

sources.TextFiles.rows = rows
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_worker_processes_end_with_the_command(tmp_path, number, code):
    source, target = write_pairs(tmp_path, "train", pairs(6000, longest=4))
    options = ["--source", source, "--target", target, "--vocab-size=330", "--workers=2"]
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "prepare", tmp_path / "ds", *options],
        env=os.environ | {"PYTHONPATH": PATH},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"encoding\n"
    # a terminal sends Ctrl-C to the workers too
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    # the pipes close when the last process that holds them has ended
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in errors) == (code, False)
    assert not (tmp_path / "ds").exists()
