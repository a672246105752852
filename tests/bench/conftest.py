"""What the benchmarks' tests share: a chip that is measured in no time."""

import pytest

from writehead.bench import floor


@pytest.fixture
def quick_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "BLOCK", {"cuda": 1 << 20, "cpu": 1 << 20})
    monkeypatch.setattr(floor, "PRODUCT", {"cuda": 64, "cpu": 64})
