import os

import pytest
import torch

import sanitize
from helpers import KERNELS


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    """A machine whose path, toolkits and packages are empty."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize.sysconfig, "get_path", lambda _: str(tmp_path / "packages"))
    monkeypatch.setattr(sanitize, "TOOLKITS", tmp_path / "local")
    return tmp_path


@pytest.mark.parametrize(
    "place",
    [
        "compute-sanitizer",
        "local/cuda/bin/compute-sanitizer",
        "local/cuda-13.0/compute-sanitizer/compute-sanitizer",
        "packages/nvidia/cu13/bin/compute-sanitizer",
        "packages/triton/backends/nvidia/bin/compute-sanitizer",
    ],
)
def test_the_sanitizer_is_found_wherever_it_may_be(nothing_installed, place):
    assert sanitize.find_sanitizer() is None
    path = nothing_installed / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    assert sanitize.find_sanitizer() == str(path)


def test_a_machine_without_the_sanitizer_is_told_where_it_comes_from(nothing_installed):
    assert "comes with NVIDIA's CUDA toolkit" in sanitize.main()


def test_every_kernel_that_is_launched_is_watched():
    names = set(sanitize.kernels())
    assert names >= KERNELS | {"_out_of_bounds_kernel"}
    assert "_load_tile" not in names


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ([0], "would see nothing else"),
        ([sanitize.FOUND, 0, sanitize.FOUND], "memcheck found errors"),
        ([sanitize.FOUND, 0, 0, 5], "ended with 5 under racecheck"),
        ([sanitize.FOUND, 0, 0, 0], None),
    ],
)
def test_errors_and_what_hides_them_are_both_failures(monkeypatch, codes, words):
    seen = []

    def run(command, *, env, **_):
        seen.append((command, env))
        return type("Done", (), {"returncode": codes[len(seen) - 1]})

    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "sanitizer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.subprocess, "run", run)
    monkeypatch.setattr(sanitize.os, "environ", dict(os.environ))
    answer = sanitize.main()
    assert (answer is None) if words is None else (words in answer)
    assert len(seen) == len(codes)
    assert "kns=attend_kernel" in seen[0][0]
