import json
from collections.abc import Callable
from pathlib import Path

import pytest

from texts import sentences


@pytest.fixture
def bench(writehead: Callable, quick_chip: None, tmp_path: Path) -> Callable[..., dict]:
    """Runs a benchmark that must succeed; returns its record."""

    def run(verb: str, *options: object) -> dict:
        path = tmp_path / "record.json"
        code, out, err = writehead("bench", verb, *options, "--output", path, "--force")
        assert code == 0, out + err
        result = json.loads(path.read_text())
        assert result["environment"]["command"].startswith(f"writehead bench {verb} ")
        assert "partial" not in result
        return result

    return run


@pytest.fixture
def files(tmp_path: Path, small_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a translation `run` and text: `text`, `blank` and `long`."""
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "run").symlink_to(small_runs / "translation")
    (folder / "text").write_text("\n".join(["", *sentences(7)]))
    (folder / "blank").write_text("\n \n")
    (folder / "long").write_text("the cat " * 40)
    return folder
