import os
from pathlib import Path

import pytest

from corpora import language_dataset
from trainings import pair_dataset
from writehead.training.step import Stepper


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    settings = {"vocab_size": 330, "dev": 9}
    return language_dataset(tmp_path_factory.mktemp("text"), 90, longest=6, **settings).directory


@pytest.fixture
def signal_at(monkeypatch):
    """Sends a signal to this process during the given steps, counted from 0."""
    update = Stepper.update

    def schedule(number: int, *steps: int) -> None:
        pending = set(steps)

        def interrupted(self, batch, step):
            if step in pending:
                pending.remove(step)
                os.kill(os.getpid(), number)
            return update(self, batch, step)

        monkeypatch.setattr(Stepper, "update", interrupted)

    return schedule
