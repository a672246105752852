import os
import sys
from pathlib import Path

import pytest

from trainings import pair_dataset, text_dataset
from writehead.cli import main
from writehead.training.step import Stepper


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    return text_dataset(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def _no_time_for_the_matrix_rate(monkeypatch):
    monkeypatch.setattr("writehead.training.loop.matrix_rate", lambda device, dtype: 1e9)


@pytest.fixture
def writehead(monkeypatch, capsys):
    """Runs the command line in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["writehead", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def signal_at(monkeypatch):
    """Sends a signal to this process while it is in the middle of the given steps, from 0."""
    update = Stepper.update

    def arrange(number: int, *moments: int) -> None:
        left = set(moments)

        def struck(self, batch, step):
            if step in left:
                left.remove(step)
                os.kill(os.getpid(), number)
            return update(self, batch, step)

        monkeypatch.setattr(Stepper, "update", struck)

    return arrange
