import sys

import pytest

import sanitize
from helpers import KERNELS


def test_every_kernel_that_is_launched_is_watched():
    assert set(sanitize.kernels()) >= KERNELS | {"_out_of_bounds_kernel", "_racing_kernel"}


RACE = "========= Error: Race reported between Write access at {}+0x90 in file.py:2"
OURS, THEIRS = RACE.format("attend_kernel"), RACE.format("nvjet_sm90_tst_64x16_v_bz")
END = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
BROKEN = "========= Internal Sanitizer Error: The Sanitizer failed to handle an exception."


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, [END], (0, set())),
        (5, [THEIRS, END], (5, set())),
        (0, [THEIRS, OURS, END], (0, {"attend_kernel"})),
        (sanitize.FOUND, [END], (sanitize.FOUND, set())),
        (0, [THEIRS], (sanitize.FOUND, set())),  # it did not reach its end
        (0, [BROKEN, END], (sanitize.FOUND, set())),
    ],
)
def test_errors_of_ours_and_what_hides_them_are_reported(tmp_path, code, said, expected):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable}\nprint(*{said!r}, sep='\\n')\nraise SystemExit({code})\n")
    tool.chmod(0o755)
    for name in ("memcheck", "racecheck"):
        assert sanitize.watch(str(tool), name, ["-c", ""], cached=False) == expected
