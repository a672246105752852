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
    assert names >= KERNELS | {"_out_of_bounds_kernel", "_racing_kernel"}
    assert "_load_tile" not in names


BOUNDS = b"""========= Invalid __global__ write of size 4 bytes
=========     at _out_of_bounds_kernel+0xb0 in faults.py:16
=========     by thread (0,0,0) in block (0,0,0)
"""
RACE = b"""========= Error: Race reported between Write access at _racing_kernel+0x90 in faults.py:2
=========     and Read access at _racing_kernel+0xa0 in faults.py:24 [124 hazards]
"""
THEIRS = b""".========= Error: Race reported between Read access at nvjet_sm90_tst_64x16_v_bz+0xb30
=========     and Write access at nvjet_sm90_tst_64x16_v_bz+0x2f90 [256 hazards]
"""
OURS = RACE.replace(b"_racing_kernel", b"attend_kernel")
END = b"========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
BROKEN = b"========= Internal Sanitizer Error: The Sanitizer failed to handle an exception.\n"
FAULTS = [(sanitize.FOUND, BOUNDS + END), (0, RACE + END)]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(0, END)], "memcheck did not see the fault"),
        ([FAULTS[0], (0, THEIRS + END)], "racecheck did not see the fault"),
        ([*FAULTS, (0, END), (sanitize.FOUND, BOUNDS + END)], "found errors in _out_of_bounds"),
        ([*FAULTS, (0, END), (sanitize.FOUND, END)], "ended with 86 under memcheck"),
        ([*FAULTS, (0, END), (0, END), (5, THEIRS + END)], "ended with 5 under racecheck"),
        ([*FAULTS, (0, END), (0, END), (0, THEIRS + OURS + END)], "errors in attend_kernel;"),
        ([*FAULTS, (0, END), (0, END), (0, THEIRS)], "ended with 86 under racecheck"),
        ([*FAULTS, (0, END), (0, END), (0, BROKEN + END)], "ended with 86 under racecheck"),
        ([*FAULTS, (0, END), (0, END), (0, THEIRS + END)], None),
    ],
)
def test_errors_and_what_hides_them_are_both_failures(monkeypatch, capsys, answers, words):
    seen = []

    class Running:
        def __init__(self, command, **_):
            self.returncode, said = answers[len(seen)]
            self.stdout = said.splitlines(keepends=True)
            seen.append(command)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "sanitizer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.subprocess, "Popen", Running)
    answer = sanitize.main()
    assert (answer is None) if words is None else (words in answer)
    assert len(seen) == len(answers)
    out = capsys.readouterr().out
    assert all(said.decode() in out for _, said in answers)
    watched = {command[command.index("--tool") + 1]: command for command in seen}
    assert "kns=attend_kernel" in watched["memcheck"]
    assert "--kernel-name" not in watched.get("racecheck", [])
    assert all(command[command.index("--print-limit") + 1] == "0" for command in seen)
