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
OTHERS = "reference or library or compiled or elements or on_a_gpu or torch.float16"
WANTED = "errs_at_most or equal or embed_adds or ring or slots or beams or several"
DIRECT = f"({WANTED}) and not ({OTHERS} or 9000)"
QUICK = "(torch.bfloat16 and (37 or 900)) or equals_the_formula_where or slots_come or beams_follow"
SMALL = f"({QUICK} or several_new) and not ({OTHERS} or packed)"
# tool, tests, pytest's -k, and whether PyTorch's caching allocator is used
PASSES = (
    ("memcheck", OPS, DIRECT, False),
    ("memcheck", SEARCH, "not concurrent", False),
    ("memcheck", ("tests/gpu",), "captured_steps and translation-multi-query", True),
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
    lines: list[str] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as running:
        for line in running.stdout:
            lines.append(line.decode(errors="replace"))
            print(lines[-1], end="", flush=True)
    output = "".join(lines)
    is_complete = " SUMMARY: " in output and "Internal Sanitizer Error" not in output
    reported = set(re.findall(r"={9}.* at (\w+)\+0x", output))
    return running.returncode or (0 if is_complete else ERROR_CODE), reported.intersection(ours)


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
    for tool, tests, selection, caching in PASSES:
        print(f"{tool}: {' '.join(tests)} -k '{selection}'", flush=True)
        work = ["-m", "pytest", *tests, "-k", selection, "-q", "-x", "-p", "no:cacheprovider"]
        code, reported = watch(sanitizer, tool, work, caching=caching)
        if reported:
            return f"{tool} found errors in {', '.join(sorted(reported))}; see above"
        if code:
            return f"the tests ended with {code} under {tool}; see above"
    return None


if __name__ == "__main__":
    sys.exit(main())
