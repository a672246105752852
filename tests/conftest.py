"""Fixtures of all tests: few threads, one seed per test, no GPU tests without a GPU."""

import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TextIO
from unittest import mock

import pytest
import torch
from hypothesis import settings

# without a GPU, kernels are interpreted; Triton reads this variable when they are defined
with mock.patch.dict(os.environ, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}):
    from writehead import engine, ops
    from writehead.cli import main

    for room in (ops, engine):
        for module in iter_modules(room.__path__):
            import_module(f"{room.__name__}.{module.name}")

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
def _log_level() -> Iterator[None]:
    """Undoes the level that a server sets, for the tests after it."""
    yield
    logging.getLogger("writehead.data.lines").setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def _small_matrix_rate() -> Iterator[None]:
    """Measures the matrix rate of a CPU with a small product: no test needs the true rate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("writehead.training.throughput.PRODUCT", {"cuda": 8192, "cpu": 64})
        yield


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

    def run(*arguments: object, stdin: bytes | TextIO = b"") -> tuple[int, str, str]:
        given = io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", given)
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
def refused(writehead: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Runs a command that must exit with code 2 and print one error line; returns the line."""

    def run(*arguments: object, **options: object) -> str:
        code, out, err = writehead(*arguments, **options)
        *progress, line = err.splitlines()
        assert (code, len(out), line[:7]) == (2, 0, "error: "), err
        assert all(step.endswith("…") for step in progress), err
        return line

    return run


@pytest.fixture(scope="session")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with random weights: `translation`, `language` and `quantized`."""
    from texts import save_small_runs  # imports the kernels, which must be defined as above

    return save_small_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch, small_runs: Path) -> Path:
    """The folder of a small run that replaces the bundled model."""
    monkeypatch.setattr("writehead.runs.bundled.BUNDLED", small_runs / "quantized")
    return small_runs / "quantized"
