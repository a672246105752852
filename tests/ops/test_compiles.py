"""Every kernel compiles for an H200, without a GPU: the interpreter accepts more than the compiler.

The script runs in its own process, where kernels are not interpreted.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import KERNELS


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).parents[1] / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(done.stdout.split()) == KERNELS
