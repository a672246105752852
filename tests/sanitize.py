"""Runs kernel tests under NVIDIA's compute-sanitizer: exit code 1 where it finds an error of ours.

For each tool a kernel with a fault comes first: unless that is found, finding nothing would mean
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
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TOOLKITS = Path("/usr/local")
FOUND = 86  # what compute-sanitizer is to exit with where it finds an error
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
FAULTS = ROOT / "tests/faults.py"
TESTS = ("tests/gpu", "tests/kernels/test_begin.py", "tests/kernels/test_choose.py")
DIRECT = (
    "((reading_a_memory or appending) and dtype0 and not 9000 and not 5000) "
    "or product_of_one_row or products_of_few_rows or products_by_tiles "
    "or ((packed_attention or noise_on_the_weights) and (dtype0 or dtype2)) "
    "or loss_of_a_large_vocabulary"
)
FEW = (
    "((reading_a_memory or appending) and dtype0 and (37 or 900)) "
    "or product_of_one_row or products_of_few_rows or products_by_tiles "
    "or sentence_begins_as_it_was_told or survey_knows or likeliest_token_is_chosen "
    "or steps_of_a_beam"
)
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
    """The names of our kernels, and of those with a fault; of their parts only some."""
    sources = [*sorted((ROOT / "src/writehead/kernels").glob("*.py")), FAULTS]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)", text, re.MULTILINE)
    return [name for name in names if name.endswith("_kernel") or not name.startswith("_")]


def watch(sanitizer: str, tool: str, work: list[str], *, cached: bool) -> tuple[int, set[str]]:
    """The exit code of a Python command under a tool, and those of our kernels it says err.

    A tool that breaks, or says no summary at its end, has the code of one that found something.
    """
    ours = kernels()
    options = ["--tool", tool, "--report-api-errors", "no", "--print-limit", "0"]
    if tool == "memcheck":
        options += ["--error-exitcode", str(FOUND)]
        options += [part for name in ours for part in ("--kernel-name", f"kns={name}")]
    command = [sanitizer, *options, sys.executable, *work]
    environment = {**os.environ, **({} if cached else NO_CACHE)}
    named: set[str] = set()
    is_whole, is_broken = False, False
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            said = line.decode(errors="replace")
            print(said, end="", flush=True)
            named.update(re.findall(r"={9}.* at (\w+)\+0x", said))
            is_whole = is_whole or " SUMMARY: " in said
            is_broken = is_broken or "Internal Sanitizer Error" in said
    code = running.returncode if is_whole and not is_broken else running.returncode or FOUND
    return code, named.intersection(ours)


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
    for tool in dict.fromkeys(one.tool for one in PASSES):
        if not watch(sanitizer, tool, [str(FAULTS), tool], cached=False)[1]:
            return f"{tool} did not see the fault of a kernel, so it would see nothing else"
        print(f"found by {tool}, as it should be: a kernel's fault", flush=True)
    for one in PASSES:
        print(f"{one.tool}: {one.tests}", flush=True)
        work = ["-m", "pytest", *TESTS, "-q", "-x", "-p", "no:cacheprovider", "-k", one.tests]
        code, named = watch(sanitizer, one.tool, work, cached=one.cached)
        if named:
            return f"{one.tool} found errors in {', '.join(sorted(named))}; they stand above"
        if code:
            return f"the tests ended with {code} under {one.tool}; what they say stands above"
    return None


if __name__ == "__main__":
    sys.exit(main())
