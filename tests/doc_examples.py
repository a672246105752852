"""Runs the examples of Markdown pages and compares their output with what the page shows."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
SESSION = r"^\$ (.*?[^\\])\n(?=(.*?)(?:^\$ |\Z))"  # a command, then its output


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: info string and text."""
    fence = r"^```(\w[^\n]*)\n(.*?)^```$"
    return re.findall(fence, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run_python(page: Path) -> int:
    """Executes the python blocks in order, in one namespace; returns how many outputs agreed.

    The output of a block is compared with the `text` block after it, or must be empty.
    """
    names: dict[str, object] = {}
    compared = 0
    for (language, code), (following, expected) in pairwise([*blocks(page), ("", "")]):
        if language != "python":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(page), "exec"), names)
        shown = expected if following == "text" else ""
        assert printed.getvalue() == shown
        compared += bool(shown)
    return compared


def sessions(page: Path, info: str) -> list[tuple[str, str]]:
    """The commands in blocks with this info string, each with the output that is shown."""
    return [
        (match[1].replace("\\\n", " "), match[2])
        for language, text in blocks(page)
        if language == info
        for match in re.finditer(SESSION, text, re.DOTALL | re.MULTILINE)
    ]


def run(command: str, folder: Path) -> str:
    """Runs a command that names `writehead` in a shell; returns its standard output."""
    program = f"{shlex.quote(sys.executable)} -m writehead "
    line = re.sub(r"(?<![\w/.-])writehead ", lambda _: program, command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def assert_shows(expected: str, printed: str) -> None:
    """Asserts that a page shows this output; a line `…` stands for any lines left out."""
    lines = [line.rstrip() for line in printed.splitlines()]
    for part in re.split(r"^…\n", expected, flags=re.MULTILINE):
        shown = [line.rstrip() for line in part.splitlines()]
        starts = range(len(lines) - len(shown) + 1)
        start = next((i for i in starts if lines[i : i + len(shown)] == shown), None)
        assert start is not None, f"{part}\nis not in\n{printed}"
        lines = lines[start + len(shown) :]
