"""Runs kernel tests under NVIDIA's compute-sanitizer: exit code 1 where it finds an error of ours.

Only our kernels are watched. A kernel that writes out of bounds on purpose comes first: unless that
is found, finding nothing would mean nothing. Tests that call kernels directly run without PyTorch's
cache of memory, so that each tensor has bounds of its own; captured steps need the cache.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TOOLKITS = Path("/usr/local")
FOUND = 86  # what compute-sanitizer is to exit with where it finds an error
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
PROBE = ROOT / "tests/out_of_bounds.py"
DIRECT = (
    "((reading_a_memory or appending) and dtype0 and not 9000 and not 5000) "
    "or product_of_one_row or products_of_few_rows or products_by_tiles "
    "or ((packed_attention or noise_on_the_weights) and (dtype0 or dtype2)) "
    "or loss_of_a_large_vocabulary"
)
FEW = "((reading_a_memory or appending) and dtype0 and (37 or 900)) or products_of_few_rows"
CAPTURED = "batches_of_every_size and (greedy-2 or beam-2)"


@dataclass(frozen=True)
class Pass:
    """A tool, the tests that it watches (pytest's -k), and whether PyTorch caches memory."""

    tool: str
    tests: str
    cached: bool = False


PASSES = (Pass("memcheck", DIRECT), Pass("memcheck", CAPTURED, cached=True), Pass("racecheck", FEW))


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is: on the path, in a CUDA toolkit, or in a package of pip's."""
    name = "compute-sanitizer"
    if found := shutil.which(name):
        return found
    toolkits = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    folders = [Path(toolkit) for toolkit in toolkits if toolkit]
    folders += [TOOLKITS / "cuda", *sorted(TOOLKITS.glob("cuda-*"), reverse=True)]
    packages = Path(sysconfig.get_path("purelib"))
    folders += [*packages.glob("nvidia/*"), packages / "triton/backends/nvidia"]
    for folder in folders:
        for place in (folder / "bin" / name, folder / name / name):
            if os.access(place, os.X_OK):
                return str(place)
    return None


def kernels() -> list[str]:
    """The names of all kernels of our modules and the probe's; of their parts only some."""
    sources = [*sorted((ROOT / "src/writehead/kernels").glob("*.py")), PROBE]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)", text, re.MULTILINE)
    return [name for name in names if name.endswith("_kernel") or not name.startswith("_")]


def watch(sanitizer: str, tool: str, work: list[str], *, cached: bool) -> int:
    """The exit code of a Python command under a tool."""
    names = [part for name in kernels() for part in ("--kernel-name", f"kns={name}")]
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
    command = [sanitizer, *options, *names, sys.executable, *work]
    environment = {**os.environ, **({} if cached else NO_CACHE)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> str | None:
    """None where nothing was found; else the sentence that says what was, or what is missing."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return (
            "compute-sanitizer is not installed; it comes with NVIDIA's CUDA toolkit: put it on "
            "the path, or set CUDA_HOME to the toolkit"
        )
    if not torch.cuda.is_available():
        return "compute-sanitizer watches kernels on a GPU, and there is none here"
    if watch(sanitizer, "memcheck", [str(PROBE)], cached=False) != FOUND:
        return f"{sanitizer} did not see a kernel write out of bounds, so it would see nothing else"
    print("found, as it should be: a kernel that writes out of bounds on purpose", flush=True)
    for one in PASSES:
        print(f"{one.tool}: {one.tests}", flush=True)
        work = ["-m", "pytest", "tests/gpu", "-q", "-x", "-p", "no:cacheprovider", "-k", one.tests]
        code = watch(sanitizer, one.tool, work, cached=one.cached)
        if code == FOUND:
            return f"{one.tool} found errors; they stand above"
        if code:
            return f"the tests ended with {code} under {one.tool}; what they say stands above"
    return None


if __name__ == "__main__":
    sys.exit(main())
