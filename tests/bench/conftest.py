"""What the benchmarks' tests share: a chip that is measured in no time, or never."""

import pytest

from writehead.bench import floor


@pytest.fixture
def quick_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "BLOCK", {"cuda": 1 << 20, "cpu": 1 << 20})
    monkeypatch.setattr(floor, "PRODUCT", {"cuda": 64, "cpu": 64})


@pytest.fixture
def no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever measures before all that was asked for is checked fails."""

    def measured(*given: object) -> None:
        pytest.fail("the chip was measured first")

    monkeypatch.setattr(floor, "measure_chip", measured)
