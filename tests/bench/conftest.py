from pathlib import Path

import pytest

from texts import save_small_runs, sentences
from writehead.bench import floor


@pytest.fixture
def no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test that measures the chip."""
    monkeypatch.setattr(floor, "measure_chip", lambda *given: pytest.fail("the chip was measured"))


@pytest.fixture(scope="package")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a translation run, `plain`, and of text: `text`, `blank` and `long`."""
    folder = tmp_path_factory.mktemp("files")
    save_small_runs(folder)
    (folder / "text").write_text("\n".join(["", *sentences(7)]))
    (folder / "blank").write_text("\n \n")
    (folder / "long").write_text("the cat " * 40)
    return folder
