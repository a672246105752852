"""Runs kernel tests under NVIDIA's compute-sanitizer; exits with 1 if our kernels have errors.

Each tool first runs a kernel with a known fault: unless it reports that fault, its silence means
nothing. memcheck watches our kernels only. racecheck fails if any kernel is left out, so it watches
all, and races in the kernels of libraries are ignored.

Tests that call kernels directly run without PyTorch's caching allocator, so that each tensor has
its own bounds; captured graphs need the allocator.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
ERROR_CODE = 86  # the exit code of compute-sanitizer if it finds an error
FAULTS = ROOT / "tests/faults.py"
OPS = tuple(
    f"tests/ops/test_{name}.py"
    for name in ("decode_attention", "embedding", "linear", "loss", "norm", "packed_attention")
)
SEARCH = ("tests/engine/test_search_kernels.py",)
OTHERS = "reference or library or auto or compiled or elements or on_a_gpu or torch.float16"
KERNELS = "equal or errs or errors or embed or slots or losses or layout or padding"
DIRECT = f"({KERNELS}) and not ({OTHERS} or 9000)"
QUICK = "a_loop or where_nothing or split_depth or norms_equal or embed_adds or layout"
SMALL = f"({QUICK} or (losses_and_gradients and 7)) and not ({OTHERS})"
# tool, tests, pytest's -k, and whether PyTorch's caching allocator is used
PASSES = (
    ("memcheck", OPS, DIRECT, False),
    ("memcheck", SEARCH, "not concurrent", False),
    (
        "memcheck",
        ("tests/gpu/test_decoding_on_gpu.py",),
        "captured_steps and translation-multi-query",
        True,
    ),
    ("racecheck", OPS, SMALL, False),
    ("racecheck", SEARCH, "kernels_equal or samples_equal or vocabularies", False),
)


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer: on PATH, in a CUDA toolkit, or in a Python package."""
    name, packages = "compute-sanitizer", Path(sysconfig.get_path("purelib"))
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(toolkit) for toolkit in toolkits if toolkit]
    folders += [*packages.glob("nvidia/*"), packages / "triton/backends/nvidia"]
    places = [folder / part / name for folder in folders for part in ("bin", name)]
    executable = (str(place) for place in places if os.access(place, os.X_OK))
    return shutil.which(name) or next(executable, None)


def kernels() -> list[str]:
    """The names of our kernels and of the faulty ones; helper functions may be among them."""
    sources = [*sorted((ROOT / "src/writehead").glob("*/*.py")), FAULTS]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)", text, re.MULTILINE)
    return [name for name in names if name.endswith("_kernel") or not name.startswith("_")]


def watch(sanitizer: str, tool: str, work: list[str], *, caching: bool) -> tuple[int, set[str]]:
    """The exit code of a Python command under a tool, and our kernels that the tool reports.

    A tool that crashes, or prints no summary, counts as an error.
    """
    ours = kernels()
    options = ["--tool", tool, "--report-api-errors", "no", "--print-limit", "0"]
    if tool == "memcheck":
        options += ["--error-exitcode", str(ERROR_CODE)]
        options += [part for name in ours for part in ("--kernel-name", f"kns={name}")]
    command = [sanitizer, *options, sys.executable, *work]
    environment = {**os.environ, **({} if caching else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **pipes)
    output = done.stdout.decode(errors="replace")
    print(f"{tool}: {' '.join(work)}\n{output}", flush=True)
    is_complete = " SUMMARY: " in output and "Internal Sanitizer Error" not in output
    reported = set(re.findall(r"={9}.* at (\w+)\+0x", output))
    return done.returncode or (0 if is_complete else ERROR_CODE), reported.intersection(ours)


def run_tests(sanitizer: str, tool: str, file: str, selection: str, caching: bool) -> str | None:
    """Runs the selected tests of a file under a tool; returns an error message or None."""
    work = ["-m", "pytest", file, "-k", selection, "-q", "-x", "-p", "no:cacheprovider"]
    code, reported = watch(sanitizer, tool, work, caching=caching)
    if reported:
        return f"{tool} found errors in {', '.join(sorted(reported))}"
    return f"the tests in {file} exited with code {code} under {tool}" if code else None


def main() -> str | None:
    """None if there is no error; otherwise a sentence for standard error."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return "compute-sanitizer is not installed; put it on PATH or set CUDA_HOME"
    if not torch.cuda.is_available():
        return "compute-sanitizer needs a GPU, and this machine has none"
    for tool in ("memcheck", "racecheck"):
        if not watch(sanitizer, tool, [str(FAULTS), tool], caching=False)[1]:
            return f"{tool} did not report the fault of a faulty kernel"
    runs = [
        (sanitizer, tool, file, selection, caching)
        for tool, files, selection, caching in PASSES
        for file in files
    ]
    with ThreadPoolExecutor(min(len(runs), os.cpu_count() or 1)) as pool:
        problems = [problem for problem in pool.map(run_tests, *zip(*runs, strict=True)) if problem]
    return f"{'; '.join(problems)}; see above" if problems else None


if __name__ == "__main__":
    sys.exit(main())
