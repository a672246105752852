"""Kernels run compiled on a GPU, and in Triton's interpreter without one."""

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    collect_ignore = ["test_compiles.py", "test_launch.py", "test_packed_attention.py"]


@pytest.fixture(autouse=True)
def _interpreted(interpreted: None) -> None:
    pass
