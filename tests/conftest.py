"""Fixtures of all tests: few threads, one seed per test, no GPU tests without a GPU."""

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings

from writehead.cli import main

if not torch.cuda.is_available() and find_spec("triton"):
    # kernels are interpreted if this is set when they are defined
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        names = "beams begin choose decode label_loss linear packed_kernels pointwise tiles"
        for name in names.split():
            import_module(f"writehead.kernels.{name}")

settings.register_profile("writehead", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("writehead")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_matrix_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the matrix rate of a CPU with a small product: no test needs the true rate."""
    monkeypatch.setattr("writehead.training.throughput.PRODUCT", {"cuda": 8192, "cpu": 64})


@pytest.fixture
def quick_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes benchmarks measure the chip quickly, without garbage collection on a CPU."""
    monkeypatch.setattr("writehead.bench.floor.BLOCK", {"cuda": 1 << 20, "cpu": 1 << 20})
    monkeypatch.setattr("writehead.bench.floor.PRODUCT", {"cuda": 64, "cpu": 64})
    if not torch.cuda.is_available():
        monkeypatch.setattr("writehead.bench.decode.Place.free", lambda self: None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs kernels in Triton's interpreter if there is no GPU, in this test only."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def writehead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
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
def bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a small run that replaces the bundled model."""
    from texts import save_small_runs  # imports the kernels, which must be defined as above

    (tmp_path / "bundled").mkdir()
    run = save_small_runs(tmp_path / "bundled")[1]
    monkeypatch.setattr("writehead.model.bundled.BUNDLED", run)
    return run


@pytest.fixture
def missing_bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of a bundled model that does not exist."""
    monkeypatch.setattr("writehead.model.bundled.BUNDLED", tmp_path / "none")
    return tmp_path / "none"
