"""Shared by all tests: few threads, one seed per test, no GPU tests without a GPU."""

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
    # kernels are interpreted if this is set when they are defined, whichever test comes first
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        names = "beams begin choose decode label_loss linear packed_kernels pointwise tiles"
        for name in names.split():
            import_module(f"writehead.kernels.{name}")

settings.register_profile("writehead", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("writehead")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_matrix_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures a CPU's matrix rate by a small product: no test needs the true rate."""
    monkeypatch.setattr("writehead.training.throughput.PRODUCT", {"cuda": 8192, "cpu": 64})


@pytest.fixture
def quick_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets benchmarks measure the chip at once, and collects no garbage on a CPU."""
    monkeypatch.setattr("writehead.bench.floor.BLOCK", {"cuda": 1 << 20, "cpu": 1 << 20})
    monkeypatch.setattr("writehead.bench.floor.PRODUCT", {"cuda": 64, "cpu": 64})
    if not torch.cuda.is_available():
        monkeypatch.setattr("writehead.bench.decode.Place.free", lambda self: None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs kernels in Triton's interpreter where there is no GPU, in this test alone."""
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
    from texts import save_small_runs  # brings the kernels, which are defined above

    folder = tmp_path / "box"
    folder.mkdir()
    run = save_small_runs(folder)[1]
    monkeypatch.setattr("writehead.model.bundled.BUNDLED", run)
    return run


@pytest.fixture
def empty_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of the bundled model, which does not exist."""
    monkeypatch.setattr("writehead.model.bundled.BUNDLED", tmp_path / "none")
    return tmp_path / "none"
