"""Commands work without optional packages, or name the extra to install before they start."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainings import CONFIG, go, pair_dataset, steps
from writehead.errors import MissingPackage
from writehead.training.journal import read_log
from writehead.util.extras import requires

# importing a package whose entry is None fails
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from writehead.cli import main
for arguments in {commands!r}:
    sys.argv = ["writehead", *arguments]
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code, file=sys.stderr)
"""


def run(missing, commands, folder, text=""):
    """Runs commands in a new process in which the missing packages cannot be imported."""
    command = [sys.executable, "-c", WITHOUT.format(missing=missing, commands=commands)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, input=text)


def sentence(package, extra):
    words = f"{package} is not installed; install it with pip install"
    return f"error: {words} 'writehead[{extra}]'"


def test_commands_that_need_no_extra_work_without_them(tmp_path):
    commands = [["explain", "tiny/multi-query", "--batch=1"], ["translate", "--device=cpu"]]
    done = run(["matplotlib", "tensorboard", "sacrebleu"], commands, tmp_path, "Good morning.\n")
    assert done.stderr.splitlines() == ["exit 0"] * len(commands)
    assert "Morgen" in done.stdout.splitlines()[-1]


def test_commands_that_draw_name_the_extra_before_they_start(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    commands = [["report"], ["bench", "plot", "result.json", "figures"], ["demo"]]
    done = run(["matplotlib"], commands, tmp_path)
    expected = [(sentence("matplotlib", extra), "exit 2") for extra in ("plot",) * 2 + ("demo",)]
    assert done.stderr.splitlines() == [line for both in expected for line in both]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("demo", ["demo"]),
        ("evaluate", ["evaluate", "--source=a", "--reference=a", "--device=cpu"]),
        ("evaluate", ["evaluate", "--test-set=wmt14", "--device=cpu"]),
        ("evaluate", ["reproduce", "table1", "--scale=tiny", "--device=cpu"]),
    ],
)
@pytest.mark.usefixtures("bundled")
def test_commands_that_score_name_the_extra_before_they_start(
    tmp_path, monkeypatch, writehead, extra, arguments
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("a").write_text("Good morning.\n")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    code, _, err = writehead(*arguments)
    assert (code, err) == (2, sentence("sacrebleu", extra) + "\n")
    assert [path.name for path in Path().iterdir()] == ["a"]


def test_training_without_tensorboard_logs_the_same_metrics(tmp_path, monkeypatch):
    dataset = pair_dataset(tmp_path)
    monkeypatch.setattr("writehead.training.loop.matrix_rate", lambda device, dtype: 1e9)
    go(dataset, tmp_path / "with")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    go(dataset, tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    losses = [[one.get("loss") for one in read_log(tmp_path / run)] for run in ("with", "without")]
    assert losses[0] == losses[1]
    assert steps(tmp_path / "without")[-1] == CONFIG.steps


def test_requires_names_the_extra_of_a_missing_package():
    with pytest.raises(MissingPackage, match=r"nowhere is not .*\[plot\]"), requires("plot"):
        import nowhere.inside  # noqa: F401
