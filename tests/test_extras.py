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
sys.modules.update(dict.fromkeys(["matplotlib", "tensorboard", "sacrebleu", "fastapi"]))
from writehead.cli import main
for command in ("explain tiny/multi-query", "translate", "report", "bench plot a figures", "demo",
                "serve --port 0"):
    sys.argv = ["writehead", *command.split()]
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code, file=sys.stderr)
"""


def test_commands_that_need_no_extra_work_without_them(tmp_path):
    _, out, err = run_python(WITHOUT, cwd=tmp_path, input="Good morning.\n")
    assert "Morgen" in out.splitlines()[-1]
    words = "is not installed; install it with pip install"
    missing = [("matplotlib", "plot"), ("matplotlib", "plot"), ("matplotlib", "demo")]
    missing.append(("fastapi", "serve"))
    refusals = [
        (f"error: {name} {words} 'writehead[{extra}]'", "exit 2") for name, extra in missing
    ]
    assert err.splitlines() == ["exit 0"] * 2 + [line for both in refusals for line in both]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("sacrebleu", "demo", "demo"),
        ("sacrebleu", "evaluate", "evaluate --source=a --reference=a --device=cpu"),
        ("sacrebleu", "evaluate", "evaluate --test-set=wmt14 --device=cpu"),
        ("sacrebleu", "evaluate", "reproduce table1 --scale=tiny --device=cpu"),
        ("pyarrow", "hub", "prepare data --hub=parquet --pair=en-de"),
        ("pyarrow", "hub", "prepare data --hub=somebody/something"),
        ("pyarrow", "hub", "translate --input=parquet --output=out/"),
        ("huggingface_hub", "hub", "prepare data --hub=somebody/something"),
    ],
)
@pytest.mark.usefixtures("bundled")
def test_commands_name_their_extra(tmp_path, monkeypatch, refused, package, extra, arguments):
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("Good morning.\n")
    Path("parquet").mkdir()
    Path("parquet", "train.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet" if package == "pyarrow" else package, None)
    words = f"error: {package} is not installed; install it with pip install"
    assert refused(*arguments.split()) == f"{words} 'writehead[{extra}]'"
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
