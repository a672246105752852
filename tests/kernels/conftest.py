"""Kernels run compiled on a GPU, and in Triton's interpreter without one."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    collect_ignore = sorted(files - {"test_attend.py", "test_visibility.py"})


@pytest.fixture(autouse=True)
def _interpreted(interpreted: None) -> None:
    pass
