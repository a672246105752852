import sys

import pytest

import sanitize
from helpers import KERNELS


def test_every_launched_kernel_is_watched():
    assert set(sanitize.kernels()) >= KERNELS | {"_out_of_bounds_kernel", "_racing_kernel"}


RACE = "========= Error: Race reported between Write access at {}+0x90 in file.py:2"
OURS, THEIRS = RACE.format("attend_kernel"), RACE.format("nvjet_sm90_tst_64x16_v_bz")
END = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
BROKEN = "========= Internal Sanitizer Error: The Sanitizer failed to handle an exception."


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (0, [END], (0, set())),
        (5, [THEIRS, END], (5, set())),
        (0, [THEIRS, OURS, END], (0, {"attend_kernel"})),
        (sanitize.ERROR_CODE, [END], (sanitize.ERROR_CODE, set())),
        (0, [THEIRS], (sanitize.ERROR_CODE, set())),  # no summary
        (0, [BROKEN, END], (sanitize.ERROR_CODE, set())),
    ],
)
def test_errors_of_our_kernels_and_incomplete_runs_are_reported(tmp_path, code, output, expected):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nprint(*{output!r}, sep='\\n')\nraise SystemExit({code})\n"
    )
    tool.chmod(0o755)
    for name in ("memcheck", "racecheck"):
        assert sanitize.watch(str(tool), name, ["-c", ""], caching=False) == expected
