"""Commands work without optional packages, or name the extra to install before they start."""

import sys
from pathlib import Path

import pytest

from processes import run_python
from trainings import CONFIG, go, pair_dataset, steps
from writehead.training.journal import read_log

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
    code = WITHOUT.format(missing=missing, commands=commands)
    return run_python(code, cwd=folder, input=text)[1:]


def sentence(package, extra):
    words = f"{package} is not installed; install it with pip install"
    return f"error: {words} 'writehead[{extra}]'"


def test_commands_that_need_no_extra_work_without_them(tmp_path):
    commands = [["explain", "tiny/multi-query", "--batch=1"], ["translate", "--device=cpu"]]
    missing = ["matplotlib", "tensorboard", "sacrebleu"]
    out, err = run(missing, commands, tmp_path, "Good morning.\n")
    assert err.splitlines() == ["exit 0"] * len(commands)
    assert "Morgen" in out.splitlines()[-1]


def test_commands_that_draw_name_the_extra_before_they_start(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    commands = [["report"], ["bench", "plot", "result.json", "figures"], ["demo"]]
    _, err = run(["matplotlib"], commands, tmp_path)
    expected = [(sentence("matplotlib", extra), "exit 2") for extra in ("plot",) * 2 + ("demo",)]
    assert err.splitlines() == [line for both in expected for line in both]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("sacrebleu", "demo", "demo"),
        ("sacrebleu", "evaluate", "evaluate --source=a --reference=a --device=cpu"),
        ("sacrebleu", "evaluate", "evaluate --test-set=wmt14 --device=cpu"),
        ("sacrebleu", "evaluate", "reproduce table1 --scale=tiny --device=cpu"),
        ("pyarrow", "hub", "prepare data --hub=parquet --pair=en-de"),
        ("huggingface_hub", "hub", "prepare data --hub=somebody/something"),
    ],
)
@pytest.mark.usefixtures("bundled")
def test_commands_that_score_or_download_name_the_extra_before_they_start(
    tmp_path, monkeypatch, refused, package, extra, arguments
):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("Good morning.\n")
    Path("parquet").mkdir()
    Path("parquet", "train.parquet").touch()
    for name in ("sacrebleu", "pyarrow.parquet", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    assert refused(*arguments.split()) == sentence(package, extra)
    assert {path.name for path in Path().iterdir()} == {"a", "parquet"}


def test_training_without_tensorboard_logs_the_same_metrics(tmp_path, monkeypatch):
    dataset = pair_dataset(tmp_path)
    go(dataset, tmp_path / "with")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    go(dataset, tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    losses = [[one.get("loss") for one in read_log(tmp_path / run)] for run in ("with", "without")]
    assert losses[0] == losses[1]
    assert steps(tmp_path / "without")[-1] == CONFIG.steps
