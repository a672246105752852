"""Runs kernel tests under NVIDIA's compute-sanitizer; exits with 1 if it finds an error of ours.

For each tool a kernel with a fault comes first: unless the tool finds that, its silence would mean
nothing. memcheck watches our kernels alone. racecheck has to watch all, since it ends with an error
of its own where some are left out; races that it reports in kernels of libraries are not ours.

Tests that call kernels directly run without PyTorch's cache of memory, so that each tensor has
bounds of its own; captured steps need the cache.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
FOUND = 86  # the exit code of compute-sanitizer where it finds an error
FAULTS = ROOT / "tests/faults.py"
DIRECT = (
    "(errs_at_most_twice and not float16 and not 9000 and not 5000) "
    "or one_row or few_rows or by_tiles or losses"
)
SMALL = (
    "((bfloat16 and (37 or 900)) or one_row or few_rows or by_tiles or begins or survey "
    "or likeliest or steps_of_a_beam) and not packed"
)
# the tool, the tests, those of them that run, and whether PyTorch caches memory
PASSES = (
    ("memcheck", "tests/kernels", DIRECT, False),
    ("memcheck", "tests/gpu", "batches_of_every_size and (greedy-2 or beam-2)", True),
    ("racecheck", "tests/kernels", SMALL, False),
)


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer: on PATH, in a CUDA toolkit, or in a Python package."""
    name = "compute-sanitizer"
    if found := shutil.which(name):
        return found
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    packages = Path(sysconfig.get_path("purelib"))
    folders = [Path(toolkit) for toolkit in toolkits if toolkit]
    folders += [*packages.glob("nvidia/*"), packages / "triton/backends/nvidia"]
    for folder in folders:
        for place in (folder / "bin" / name, folder / name / name):
            if os.access(place, os.X_OK):
                return str(place)
    return None


def kernels() -> list[str]:
    """The names of our kernels, and of those with a fault; of their parts only some."""
    sources = [*sorted((ROOT / "src/writehead/kernels").glob("*.py")), FAULTS]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)", text, re.MULTILINE)
    return [name for name in names if name.endswith("_kernel") or not name.startswith("_")]


def watch(sanitizer: str, tool: str, work: list[str], *, cached: bool) -> tuple[int, set[str]]:
    """The exit code of a Python command under a tool, and the kernels of ours that it reports.

    A tool that breaks, or prints no summary at its end, counts as one that found something.
    """
    ours = kernels()
    options = ["--tool", tool, "--report-api-errors", "no", "--print-limit", "0"]
    if tool == "memcheck":
        options += ["--error-exitcode", str(FOUND)]
        options += [part for name in ours for part in ("--kernel-name", f"kns={name}")]
    command = [sanitizer, *options, sys.executable, *work]
    environment = {**os.environ, **({} if cached else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})}
    named: set[str] = set()
    is_whole, is_broken = False, False
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as running:
        for line in running.stdout:
            said = line.decode(errors="replace")
            print(said, end="", flush=True)
            named.update(re.findall(r"={9}.* at (\w+)\+0x", said))
            is_whole = is_whole or " SUMMARY: " in said
            is_broken = is_broken or "Internal Sanitizer Error" in said
    code = running.returncode if is_whole and not is_broken else running.returncode or FOUND
    return code, named.intersection(ours)


def main() -> str | None:
    """None where nothing was found; otherwise a sentence for standard error."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return (
            "compute-sanitizer is not installed; it comes with NVIDIA's CUDA toolkit: put it on "
            "PATH, or set CUDA_HOME to the toolkit"
        )
    if not torch.cuda.is_available():
        return "compute-sanitizer needs a GPU, and there is none here"
    for tool in ("memcheck", "racecheck"):
        if not watch(sanitizer, tool, [str(FAULTS), tool], cached=False)[1]:
            return f"{tool} did not find the fault of a kernel that has one"
        print(f"{tool} found the fault of a kernel, as it should", flush=True)
    for tool, tests, chosen, cached in PASSES:
        print(f"{tool}: {tests} -k '{chosen}'", flush=True)
        work = ["-m", "pytest", tests, "-k", chosen, "-q", "-x", "-p", "no:cacheprovider"]
        code, named = watch(sanitizer, tool, work, cached=cached)
        if named:
            return f"{tool} found errors in {', '.join(sorted(named))}; see above"
        if code:
            return f"the tests ended with {code} under {tool}; see above"
    return None


if __name__ == "__main__":
    sys.exit(main())
