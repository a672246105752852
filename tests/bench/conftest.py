from pathlib import Path

import pytest

from texts import sentences
from writehead.bench import floor


@pytest.fixture
def no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test that measures the chip."""
    monkeypatch.setattr(floor, "measure_chip", lambda *given: pytest.fail("the chip was measured"))


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
